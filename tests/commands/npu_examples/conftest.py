"""The examples are run by test_npu_scripts.py, as scripts; they are nothing to collect."""

collect_ignore_glob = ["*.py"]
