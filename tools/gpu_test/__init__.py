"""`make gpu-test`: measure on this machine's GPUs what a CPU cannot tell, and compare it with what is expected.

    python -m tools.gpu_test --list                     the lines, what they need, what they expect
    python -m tools.gpu_test                            all lines, into run/gpu/gpu.json and run/gpu/gpu.md
    python -m tools.gpu_test --lines 1 4b --out DIR     some lines; DIR keeps the results of the others
    python -m tools.gpu_test --rehearse                 the same code on a CPU, with tiny shapes; nothing is judged

lines.py is the table. Each line runs in a process of its own (runner.py, child.py), with a deadline. It reports figures
one by one (report.py), so that a crash or a hang keeps what was measured. needs.py says what a machine lacks. The
other modules measure.
"""
