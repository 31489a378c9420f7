"""The architectures of the corpus as cases, of which any layer may end with any status."""

from corpus.models.architectures import ARCHITECTURES as BUILT
from corpus.models.hooked import Case

ARCHITECTURES = {
    name: Case(built.build, built.inputs, statuses=None) for name, built in BUILT.items()
}
