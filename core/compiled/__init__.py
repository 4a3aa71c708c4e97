"""Regions compiled ahead of time: by a child with little priority, into files that any later start loads.

Only the child imports a compiler. A worker loads finished files, each tried out against the function
it stands for, and computes eagerly whatever is not there: nobody waits for a compilation.

    regions -> keys -> artifacts there?  -> checks -> Region.run
                       child -> compiler -> checks -> artifacts
"""
