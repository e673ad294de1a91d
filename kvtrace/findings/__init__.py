"""What a whole run says in plain sentences, each with its evidence: facts gathered by SQL, checked by pure code."""
