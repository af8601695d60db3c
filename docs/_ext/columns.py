"""Indented columns in a module's docstring, a word and what it means, as a list of definitions."""


def definitions(app, what, name, obj, options, lines):
    if what != "module":
        return
    column = max((_indent(line) for line in lines), default=0)
    result = []
    goes_on = False
    for line in lines:
        if not line.startswith("    ") or column <= 4:
            result.append(line)
            continue
        # bars are absolute values, not substitutions
        term, meaning = line[4:column].strip(), line[column:].strip().replace("|", r"\|")
        if term and line[column - 1] != " ":
            # a term that is longer than its column, alone on its line
            term, meaning = line.strip(), ""
        if term and goes_on:
            result[-1] = f"{result[-1][:-2]} {term}``"
        elif term:
            result += ["", f"``{term}``"]
        # a term of several lines
        goes_on = bool(term) and term.endswith(",")
        if meaning:
            result.append(f"    {meaning}")
    lines[:] = result


def _indent(line):
    return len(line) - len(line.lstrip())


def setup(app):
    app.connect("autodoc-process-docstring", definitions)
    return {"parallel_read_safe": True}
