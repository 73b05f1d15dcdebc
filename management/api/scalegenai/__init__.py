"""ScaleGenAI's inference API, `/sg_inf`, as its command line calls it."""
