"""512 short common English words, each one token with the space before it in nearly all vocabularies.

All are among the first merges of byte-pair vocabularies learned from English. The number is a power of
two, so that bytes taken modulo it fall evenly.
"""

_TEXT = """
about above access account across act action active add adult affect after again against age air
allow along already also always among amount and animals another answer any appear are area around
art attempt author average avoid away back base based basic became because become been before being
below best better between beyond big bill black blood body book both brain break bring build built
bus but called came can car carbon care case cat cell century certain change changes child civil
class clean clear close code collect color come common concern context control cool cost count
country course cover create created cross culture current cut daily day death deep did digital
direct discuss does doing done down due during each early earth easy eat efforts either else end
energy enjoy even event ever example exist expect explore extra eye fact fail family far feed feel
feet few field file find first fish five focus follow food for force forest form found free friend
friends from full further future gain game gas general get getting give given global going good got
great green group grow growth hand hands hard has have head heart heat help her here high higher him
history hold home host house how however human idea image impact improve include inside instead into
issue itself job just keep key kids kind known lack land lands language large larger last late law
leaders learn least led left less let life light line link list little local long longer look
looking loss love low made main major make makes making man many mark market matter may mean means
members men met method might million mind model models modern money more most move music must name
natural nature near need needed never new next night normal not now number numbers object offers
often old once only open order other others our outside over own pack page paper part pass path
pattern pay percent perform person place plan plant play point poor post power present press print
problem product program project proper provide public put quality quick quite range rather reading
real really reason record reduce regard related remain remains report require respect rest result
right role run safe said same sat say says school science search second see sense sent series set
several share she should show shown side sign simple simply since single site six size skin sleep
small social society soft some someone soon sound source space special spirit spread stand start
state states step still stop stories story strong student subject such sun support sure system table
take taken talk target team tell term test text than that the their then they things think this
those though thought three through thus time times today tool tools top toward town treat tree try
turn two type under unit until upon use used using value video view visit visual want war warm was
water way weight well what where which while white who whole will wind with within without women
wood words world would write writing written year you young your
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
