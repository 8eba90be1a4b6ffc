"""The endpoint engine: a served model is asked, and what it answers becomes a shard. ``endpoint`` puts it together.

- ``client``: the HTTP client: keys that never leave it, time-outs, retries
- ``asking``: requests, with every sampling parameter said out loud
- ``servers``: what a server says about itself
- ``probe``: what a server can do, found out by asking
- ``sending``: a run's requests, some at a time and what is missing only
- ``raw``: the responses as they came, kept beside the shard
- ``lenient``: a server's JSON and numbers, read although the form is not strict
- ``responses``: a response of any known shape as one record
- ``vocabulary``: the local tokenizer, for the ids that a response does not name
- ``rows``: one response as one row of a shard
- ``sanity``: gates before any delta: what a server's numbers cannot be
- ``from_raw``: the shard, made from the raw responses alone
"""
