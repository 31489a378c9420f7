"""The shelf of probes: checks that change something, run the model again and look at what follows.

A file is a probe, found by looking into this folder. As with checks, a run that sets a limit loads
every file, so that each imports torch where it runs, not where it is declared. What runs the model
again is `intervening`, which loads with the first probe that runs.
"""

from pytest_modelhealth.probes.probe import Probe, all_probes

__all__ = ["Probe", "all_probes"]
