"""`incv compare`: runs side by side, in the terminal and as one HTML page.

`runs` reads run directories and recorded runs into the same records. `grouping` joins the runs that differ in the
seed alone and finds what differs between the groups. `comparison` summarises each group; `text` and `page` show the
result. `grouping`, `comparison` and `text` are pure functions. Nothing here imports torch, except to find the keys of
recorded runs without `keys`: they follow from today's recipes.
"""
