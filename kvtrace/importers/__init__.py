"""Other tools' records as events of a store: one module per format, and what they share.

`source` reads files, a format's module turns lines into records, `identity` finds the request that a record is of,
`intake` strings the steps together. What a source does not say is not made up: it stays unattributed.
"""
