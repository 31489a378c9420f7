"""What ``python -m pytest_modelhealth init`` does.

`naming` finds what a user names, `building` says how it is made, `small_configs` makes models of
transformers small, `text` writes the file, `measuring` runs it under a few seeds, and `session`
joins them.
"""
