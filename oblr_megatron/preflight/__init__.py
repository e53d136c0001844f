"""What can be checked before processes start: a run (checklist.py), a dry run, this machine (`doctor`), a first config.

checklist.py                                  the checks of a run, and its opened inputs
examine.py models.py fake_ranks.py            a dry run: the models of all ranks on meta devices
device_memory.py table.py dry_run_command.py  their memory, and how it is shown
doctor.py init_command.py                     the commands `doctor` and `init`
"""
