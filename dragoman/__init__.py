"""The command `dragoman`, and in an installed wheel the folder of everything that it runs.

In a source tree the packages `config`, `engine`, `inference` and `management` stand beside this folder. The wheel keeps
them inside it: in site-packages, names as common as these would meet those of other distributions.
"""
