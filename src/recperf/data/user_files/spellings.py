"""How files of users write labels, numbers, missing values and the names of usual columns. Imports nothing heavy."""

from __future__ import annotations

import re
from typing import Final

TRUE: Final = ("1", "true", "1.0", "yes")
FALSE: Final = ("0", "false", "0.0", "no", "-1", "-1.0")
MISSING: Final = (
    "#N/A", "#NA", "-NaN", "-nan", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "\\N", "n/a", "nan", "null",
)  # fmt: skip
"""How programs write a missing value; taken for an id, all users without one would become one user."""
NUMBER: Final = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
COLUMNS: Final = {
    "user": (
        *("user", "userid", "uid", "visitorid", "visitor", "customerid", "customer", "memberid", "reviewerid"),
        *("accountid", "profileid", "clientid", "playerid", "username", "sessionid", "session"),
    ),
    "item": (
        *("item", "itemid", "iid", "movieid", "movie", "productid", "product", "articleid", "article", "adid"),
        *("trackid", "track", "songid", "song", "bookid", "book", "videoid", "video", "gameid", "game", "isbn"),
        *("parentasin", "asin", "businessid", "appid", "newsid", "animeid", "recipeid", "jobid", "courseid", "venueid"),
        *("placeid", "locationid", "poiid", "photoid", "postid", "contentid", "offerid", "adgroupid", "hotelid", "sku"),
        *("skuid", "goodsid", "aid", "artistid"),
    ),
    "time": (
        *("timestamp", "time", "ts", "datetime", "date", "eventtime", "createdat", "unixtimestamp", "unixreviewtime"),
        *("ratingtimestamp", "eventtimestamp", "eventdate", "tdat"),
    ),
    "rating": ("rating", "stars", "score", "bookrating", "overall", "reviewscore", "reviewoverall"),
    "label": (
        *("label", "clicked", "click", "isclicked", "isclick", "clk", "target", "converted", "conversion"),
        *("liked", "bought", "purchased", "isrecommended", "recommended"),
    ),
    "genres": ("genres", "genre", "categories", "category"),
}
"""Names by which the column of a role is recognised, the likeliest first, as `plain` writes them."""


def plain(name: str) -> str:
    """A column's name in small letters, without other characters."""
    return re.sub("[^a-z0-9]", "", name.lower())
