"""Checks before processes start, of a run, a dry run and this machine (`doctor`); and a first config.

checklist.py inputs.py                        the one list of checks of a run; its opened inputs
examine.py models.py fake_ranks.py            a dry run: the models of all ranks on meta devices
device_memory.py table.py dry_run_command.py  their memory, and how it is shown
doctor.py init_command.py                     the commands `doctor` and `init`
"""
