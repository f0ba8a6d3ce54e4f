"""The old name of collectives, until its users outside of this folder have the new one."""

from ballast.wrapper.collectives import by_first_rank as by_first_rank
from ballast.wrapper.collectives import from_all_ranks as from_all_ranks
