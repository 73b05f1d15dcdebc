"""From a request that a dialect has parsed to the text and tokens of its answer."""
