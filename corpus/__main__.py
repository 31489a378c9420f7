"""``python -m corpus``."""

from corpus.command import main

main()
