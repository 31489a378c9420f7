"""One line, every check: the tests of `ModelHealthSuite`, and the run of one without a file.

`suite` is the class that people inherit from, `collecting` reads what they may set in it, `making`
is what ``make()`` may return, and `case` is one of these tests, with the one model that all tests
of a class share. The other files hold the verdicts.
"""
