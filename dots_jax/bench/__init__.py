"""Times the decode implementations over named serving shapes, against a floor measured in the same run.

`shapes.py` names what is timed, `floor.py` counts its bytes and operations and measures the ceilings, `inputs.py` makes
rotating inputs, `unfused.py` and `torch_peer.py` hold the paths to compare with, `timing.py` the clock, `run.py` the
whole measurement of one shape, `table.py` the print.
"""
