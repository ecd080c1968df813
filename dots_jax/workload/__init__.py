"""The main job: requests that arrive, decode in a jitted loop over shared pages, and are checked as they go.

`synthetic` and `trace` make requests, `scheduler` admits and finishes them, `loop` holds the jitted functions, `mirror`
knows on the host what every cache must contain, `checks` compares, `job` puts them together and `report` prints.
"""
