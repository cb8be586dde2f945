"""Names of the tensors in a checkpoint, such as `model/3` and `rank/part/optimizer/7`."""

# Begin of the names of a rank's own tensors.
OWN = "rank/"
# Begin of the names of a rank's parts of divided variables, among its own tensors.
PART = "part/"
# Between the name of a table and the index of the first row of a part of it.
ROWS = "/rows/"
# End of the name of a part whose rows were dealt to the ranks in turn.
DEALT = "/dealt"
