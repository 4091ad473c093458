"""One split for all tasks of a dataset: what trains, what chooses the epoch, and what is held out.

Events are cut twice for each user: those before the first cut train, those between the cuts choose the epoch, and those
from the second one on are held out. With times the cuts of all users are two moments; with leave-one-out a user's last
event and the one before it begin the parts. Models of labels score all labelled events of a part; models that rank
items rank one event of each user in it. Rows with a label are divided row by row.

A dataset's split is a small sealed file beside its data. A run saves in its config what decided its own, and in
data.json what that came to.
"""
