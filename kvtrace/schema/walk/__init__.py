"""The second engine of attribution: the walk in SQL for all requests of a store at once, generated from the vocabulary.

`answers.requests` and `answers.segments` are SELECTs over the tables event and process. They answer for a request only
where its events fit a shape that they know, and then to the nanosecond as `kvtrace.attribution` does; else they say why
not. Every store has them as the views `walk_request` and `walk_segment`, see `kvtrace.schema.walked`.
"""
