"""Texts that try to run as programs, to leave their file, or to change how what stands beside them is read."""

HOSTILE = (
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "</script><script>window.ran = 1</script>",
    "<!--<script>",
    "'); window.ran = 1; ('",
    "\\'); window.ran = 1; //",
    "${window.ran = 1}`",
    "one\u2028two\u2029three",
    "\u202egnp.exe\u2066",
    "\x00 \x1b[2J \x1b]0;title\x07 \x9b31m \r \x7f",
    "lone \ud800 and \udfff",
    "__proto__",
)
