"""One line, every check: the tests of `ModelHealthSuite`, and the run of one without a file.

`suite` is the class that people inherit from, `attributes` what they may set in it, `making` what
``make()`` may return, `subject` the one model that the tests of a class share, and `case` one of
these tests. The other files hold the verdicts, a subject each.
"""
