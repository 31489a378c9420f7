"""Probes: checks that change something, run the model again and look at what follows.

Their catalogue alone loads with the settings; what runs the model again is `intervening`.
"""

from pytest_modelhealth.probes.catalogue import all_probes

__all__ = ["all_probes"]
