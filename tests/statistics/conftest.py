from hypothesis import settings

# The same examples on every run, and no deadline, as a shared machine may stall at any time.
settings.register_profile("modelhealth", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("modelhealth")
