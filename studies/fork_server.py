"""What the fork server of studies/jobs.py imports: the toy trainer, which its runs share. It ends with the study.

multiprocessing's fork server lives until its last child ends. Without the signal, runs of a killed study would go on,
and a study that continues it would do them a second time, in the same directories.
"""

import os

import studies.toy_trainer  # noqa: F401
from oblr_megatron.runtime.processes import die_with

die_with(os.getppid())
