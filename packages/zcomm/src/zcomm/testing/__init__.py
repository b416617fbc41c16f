"""Testing tools for code that communicates: real ranks in hundredths of a second, and a record of collectives.

`run_ranks` runs a function on N processes that stay warm between tests, and turns every way in which a rank can end
(exception, signal, hang) into one error that shows all ranks.  `recorded` counts and orders collectives.
"""

from zcomm.testing.failure import Ending, RankFailed, RankReport
from zcomm.testing.pool import end_ranks, run_ranks
from zcomm.testing.process import preload
from zcomm.testing.recording import Recording, recorded

__all__ = ["Ending", "RankFailed", "RankReport", "Recording", "end_ranks", "preload", "recorded", "run_ranks"]
