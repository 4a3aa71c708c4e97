"""Templates of our own, each with the constructs a family's real one is built of."""

CHATML_WITH_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last_user %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if message.role == 'user' or message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

HEADERS_AND_BOS = """\
{% set loop_messages = messages %}
{% for message in loop_messages %}
{% set header = '<|im_start|>' + message['role'] + '<|im_end|>\\n\\n' %}
{% set content = header + message['content'] | trim + '<|im_end|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
{{ content }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_end|>\\n\\n' }}{% endif %}
"""

INSTRUCT_WITH_MACRO = """\
{{ bos_token }}
{%- macro tools_block(list) %}[TOOLS]{{ list | tojson(indent=2) }}[/TOOLS]{% endmacro %}
{%- for message in messages %}
  {%- if message['role'] == 'system' %}{% continue %}{% endif %}
  {%- if message['role'] == 'user' %}
    {{- tools_block(tools) if tools and loop.last else '' }}[INST] {{ message['content'] }}[/INST]
  {%- elif message['role'] == 'assistant' %}
    {% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}
  {%- else %}{{ message | tojson(sort_keys=true) }}{%- endif %}
{%- endfor %}
"""

PIECED_TOGETHER = """\
{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

TEMPLATES = {
    "chatml_with_tools": CHATML_WITH_TOOLS,
    "headers_and_bos": HEADERS_AND_BOS,
    "instruct_with_macro": INSTRUCT_WITH_MACRO,
    "pieced_together": PIECED_TOGETHER,
}
