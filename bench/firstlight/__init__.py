"""`hfk firstlight`: what is run first on a card that nothing of this library has run on, made for the case that things
are wrong.

`steps` has what there is to do and what needs what; `runner` starts each step as a process of its own (`child`) and
writes down what became of it; `early`, `checks` and `timed` are the steps' work; `page` makes one page of a folder. The
folder's format is `dispatch.runfolder`'s, for `hfk evidence add` reads it.
"""
