"""The last import of the fork server: it freezes what is imported, so that garbage collections skip it.

Each rank is a fork of it. A collection that looked through all of torch would take half a second on every rank, and
make a copy of the memory that ranks share.
"""

import gc

gc.collect()
gc.freeze()
