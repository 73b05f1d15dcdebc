"""DJL Serving: its adapters, models and inference with LMI's schema, on a plane of its own."""
