"""The vocabulary of the tasks: words, keys and file names."""


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORDS = _listed("""
apple banana cherry grape kiwi lemon lime mango melon olive orange peach pear plum quince fig date nut cat dog fox
bear wolf lion tiger zebra horse mouse otter eagle crow duck goose swan frog toad trout whale red blue green yellow
purple white black brown pink gray gold silver copper iron steel wood stone glass paper river lake ocean island forest
desert valley mountain meadow canyon cloud storm rain snow wind thunder sun moon star bread butter cheese honey sugar
salt pepper coffee tea milk rice soup cake tower bridge castle harbor garden market violin piano drum flute guitar
trumpet lamp chair table window door mirror clock ladder basket bottle spoon
""")

KEYS = _listed("""
color shape fruit animal city metal name owner mode level host port user size theme drink weather title state zone
""")

STEMS = _listed("""
out result answer notes todo report data info memo draft list item value input source target final copy first second
config settings record entry page start index text sample message
""")

SUFFIXES = (".txt", ".txt", ".txt", ".md")
