"""States, gates and steps of recurrences, as people report them wrong; each with its fix."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from corpus.cards import Shelf
from corpus.models.parts import captions, tokens
from corpus.models.small import halves, images, language_loss, next_words, rows, words
from corpus.subject import Subject, subject

SHELF = Shelf("pulls", "blind")
GITHUB = "https://github.com"

UNREAD = ("never read", "nothing reads", "not read", "not used", "unused", "never used", "dropped")
CALLED = (*UNREAD, "no gradient", "no effect", "never called", "discard")
SAMPLES = ("sample", "batch", "mixe", "reshape", "view", "transpose", "permut", "axes")
GROWING = ("grow", "sum", "added", "product", "multipl", "bound", "satur", "drift")


def read(model: nn.Module) -> Subject:
    return subject(model, rows, F.cross_entropy, 32)


# ---- states --------------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/timbmg/Sentence-VAE/issues/15",
    "states of two directions viewed as (batch, 2 x size)",
    ("", "encoder*", "mean*"),
    SAMPLES,
)
def sentence_vae(fixed: bool) -> Subject:
    """States are (directions, batch, size) even with batch_first, and the view mixes samples."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = tokens(16)
            self.encoder = nn.GRU(16, 24, batch_first=True, bidirectional=True)
            self.mean, self.head = nn.Linear(48, 16), nn.Linear(16, 10)

        def forward(self, ids: Tensor) -> Tensor:
            _, states = self.encoder(self.embed(ids))
            joined = torch.cat([*states], 1) if fixed else states.view(-1, 48)
            return self.head(self.mean(joined).relu())

    return subject(Model(), words, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/salesforce/decaNLP/issues/9",
    "h handed on as the cell, too",
    ("", "encoder*", "decoder*"),
    ("cell", "twice", "same", *CALLED),
)
def deca_nlp(fixed: bool) -> Subject:
    """h, c = h[:, order], h[:, order]: the cell that was read is lost."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = tokens(16), nn.Linear(32, 18)
            self.encoder = nn.LSTM(16, 32, batch_first=True)
            self.decoder = nn.LSTM(16, 32, batch_first=True)

        def forward(self, source: Tensor, ids: Tensor) -> Tensor:
            _, (h, c) = self.encoder(self.embed(source))
            order = torch.arange(len(ids))
            h, c = h[:, order], (c if fixed else h)[:, order]
            return self.head(self.decoder(self.embed(ids), (h, c))[0])

    return subject(Model(), halves, language_loss, 16)


def short(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return token ids that end in zeros, how many there are, and labels."""
    ids, labels = words(n)
    length = torch.randint(8, 28, (n,))
    return (ids * (torch.arange(32) < length[:, None]), length), labels


@SHELF.report(
    f"{GITHUB}/ray-project/ray/issues/21392",
    "state that has read the padding",
    ("", "rnn*"),
    ("padding", "padded", "length", "valid", "last step"),
)
def rllib(fixed: bool) -> Subject:
    """The state after as many steps as the longest has: for short ones, after their padding."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(18, 16, padding_idx=0)
            self.rnn, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 10)

        def forward(self, ids: Tensor, length: Tensor) -> Tensor:
            x = self.embed(ids)
            if fixed:
                x = pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False)
            _, (h, _) = self.rnn(x)
            return self.head(h[-1])

    return subject(Model(), short, F.cross_entropy, 32)


def forecasts(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the rows of digits but the last, the ink of each of these, and that of the last."""
    pictures, _ = rows(n)
    return (pictures[:, :-1], pictures[:, :-1].mean(2, keepdim=True)), pictures[:, -1:].mean(2)


@SHELF.report(
    f"{GITHUB}/JulesBelveze/time-series-autoencoder/issues/14",
    "decoder that is not given what was encoded",
    ("", "encoder*", "decoder*"),
    CALLED,
)
def autoencoder(fixed: bool) -> Subject:
    """The decoder goes by the past of its target alone, and the encoder is for nothing."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.LSTM(8, 24, batch_first=True)
            self.decoder = nn.LSTM(1, 24, batch_first=True)
            self.head = nn.Linear(24, 1)

        def forward(self, series: Tensor, past: Tensor) -> Tensor:
            _, state = self.encoder(series)
            decoded, _ = self.decoder(past, state) if fixed else self.decoder(past)
            return self.head(decoded[:, -1])

    return subject(Model(), forecasts, F.mse_loss, 32)


def read_both_ways(n: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return digits and ids of them, and as targets the ids that follow and those before."""
    (pictures, ids), after = captions(n)
    return (pictures, ids[:, 1:9]), (after[:, 1:9], ids[:, :8])


def both_ways(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    return sum(map(language_loss, output, target), torch.zeros(()))


@SHELF.report(
    f"{GITHUB}/tal-tech/SAN/issues/13",
    "second decoder moved on by context and state of the first",
    ("", "parent*", "context*"),
    CALLED,
)
def san(fixed: bool) -> Subject:
    """A copied line feeds the other task's cell: its own context and state lead nowhere."""

    class Model(nn.Module):
        """Two decoders, each with a cell before and one after it looks at the picture."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.stem = nn.Embedding(18, 16), nn.Conv2d(1, 16, 2, 2)
            self.word_in, self.word_out = nn.GRUCell(16, 16), nn.GRUCell(16, 16)
            self.parent_in, self.parent_out = nn.GRUCell(16, 16), nn.GRUCell(16, 16)
            self.context = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
            self.word_head, self.parent_head = nn.Linear(32, 18), nn.Linear(32, 18)

        def look(self, which: int, h: Tensor, cells: Tensor) -> Tensor:
            asked = self.context[which](h)
            weights = torch.einsum("bd,bcd->bc", asked, cells).div(4).softmax(1)
            return torch.einsum("bc,bcd->bd", weights, cells)

        def forward(self, picture: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            cells = self.stem(picture).relu().flatten(2).transpose(1, 2)
            h = parent = cells.mean(1)
            said: tuple[list[Tensor], list[Tensor]] = [], []
            for word in self.embed(ids).unbind(1):
                first = self.word_in(word, h)
                seen = self.look(0, first, cells)
                h = self.word_out(seen, first)
                first_parent = self.parent_in(word, parent)
                parent_seen = self.look(1, first_parent, cells)
                given = (parent_seen, first_parent) if fixed else (seen, first)
                parent = self.parent_out(*given)
                said[0].append(self.word_head(torch.cat([h, seen], 1)))
                said[1].append(self.parent_head(torch.cat([parent, parent_seen], 1)))
            words_said, parents_said = (torch.stack(steps, 1) for steps in said)
            return words_said, parents_said

    return subject(Model(), read_both_ways, both_ways, 16)


# ---- gates ---------------------------------------------------------------------------------------


class Celled(nn.Module):
    """Reads rows by a cell of its own, and classifies by its last state."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = (torch.zeros(len(x), 24), torch.zeros(len(x), 24))
        for row in x.unbind(1):
            state = self.cell(row, state)
        return self.head(state[0])


State = tuple[Tensor, Tensor]


@SHELF.report(
    f"{GITHUB}/MartinuzziFrancesco/torchrecurrent/issues/22",
    "input gate added to what it was to gate",
    ("cell*", ""),
    (*GROWING, "gate"),
)
def torchrecurrent(fixed: bool) -> Subject:
    """sigmoid(i) + tanh(g) in place of their product lets the cell rise with each step."""

    class Original(nn.Module):
        """The LSTM of 1997, without a forget gate."""

        def __init__(self) -> None:
            super().__init__()
            self.given, self.kept = nn.Linear(8, 72), nn.Linear(24, 72, bias=False)

        def forward(self, x: Tensor, state: State) -> State:
            h, c = state
            enter, new, leave = (self.given(x) + self.kept(h)).chunk(3, 1)
            enter, new = enter.sigmoid(), new.tanh()
            c = c + (enter * new if fixed else enter + new)
            return leave.sigmoid() * c.tanh(), c

    return read(Celled(Original()))


@SHELF.report(
    f"{GITHUB}/zhiyongc/GRU-D/issues/2",
    "reset gate that is computed and resets nothing",
    ("cell*", ""),
    CALLED,
)
def gru_d(fixed: bool) -> Subject:
    """The candidate is made of the whole state, and the gate's weights cannot learn."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.update, self.reset, self.new = (nn.Linear(32, 24) for _ in range(3))

        def forward(self, x: Tensor, state: State) -> State:
            h, rest = state
            joined = torch.cat([x, h], 1)
            z, r = self.update(joined).sigmoid(), self.reset(joined).sigmoid()
            new = self.new(torch.cat([x, r * h], 1) if fixed else joined).tanh()
            return (1 - z) * h + z * new, rest

    return read(Celled(Gated()))


@SHELF.report(
    f"{GITHUB}/pytorch/tutorials/issues/647",
    "recurrent state without an activation",
    ("", "hidden*", "output*"),
    ("activation", "nonlinear", "non-linear", "linear map", "one linear", "linearly"),
)
def char_rnn(fixed: bool) -> Subject:
    """Nothing bends the state from step to step, and all of the net is one linear map."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(18, 16)
            self.hidden, self.output = nn.Linear(16 + 24, 24), nn.Linear(16 + 24, 24)
            self.joined, self.dropout = nn.Linear(24 + 24, 18), nn.Dropout(0.1)

        def forward(self, ids: Tensor) -> Tensor:
            h, said = torch.zeros(len(ids), 24), []
            for word in self.embed(ids[:, :12]).unbind(1):
                both = torch.cat([word, h], 1)
                h, out = self.hidden(both), self.output(both)
                if fixed:
                    h, out = h.tanh(), out.tanh()
                said.append(self.dropout(self.joined(torch.cat([h, out], 1))))
            return torch.stack(said, 1)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        ids, after = next_words(n)
        return ids, after[:, :12]

    return subject(Model(), draw, language_loss, 16)


# ---- maps and spikes -----------------------------------------------------------------------------


class ConvCell(nn.Module):
    """An LSTM on maps, whose gates look at the cell by peepholes."""

    def __init__(self, learnt: bool = True) -> None:
        super().__init__()
        self.given = nn.Conv2d(1, 32, 3, padding=1)
        self.kept, self.learnt = nn.Conv2d(8, 32, 3, padding=1, bias=False), learnt
        if learnt:
            self.peep = nn.ParameterList(torch.zeros(1, 8, 8, 8) for _ in range(3))

    def begin(self) -> None:
        """Make ready for a batch."""
        if not self.learnt:
            self.peep = [torch.zeros(1, 8, 8, 8) for _ in range(3)]

    def forward(self, x: Tensor, state: State) -> State:
        h, c = state
        enter, forget, new, leave = (self.given(x) + self.kept(h)).chunk(4, 1)
        enter = (enter + c * self.peep[0]).sigmoid()
        forget = (forget + c * self.peep[1]).sigmoid()
        c = forget * c + enter * new.tanh()
        return (leave + c * self.peep[2]).sigmoid() * c.tanh(), c


class Film(nn.Module):
    """Classifies a film of four frames."""

    def __init__(self, learnt: bool = True, each: bool = True) -> None:
        super().__init__()
        self.cell, self.head, self.each = ConvCell(learnt), nn.Linear(8, 10), each

    def forward(self, frames: Tensor) -> Tensor:
        self.cell.begin()
        h = c = frames.new_zeros(len(frames), 8, 8, 8)
        for step in range(frames.shape[1]):
            h, c = self.cell(frames[:, step if self.each else 0], (h, c))
        return self.head(h.mean((2, 3)))


def films(n: int) -> tuple[Tensor, Tensor]:
    """Return films (n, 4, 1, 8, 8) of digits that move to the right, and labels."""
    pictures, labels = images(n)
    return torch.stack([pictures.roll(step, 3) for step in range(4)], 1), labels


@SHELF.report(
    f"{GITHUB}/automan000/Convolutional_LSTM_PyTorch/issues/9",
    "peepholes made of zeros with each batch",
    ("cell*", ""),
    ("regist", "parameter", "plain tensor", "zero", "peep", "learn"),
)
def peepholes(fixed: bool) -> Subject:
    """What begins at zero in each forward never learns: the gates do not see the cell."""
    return subject(Film(learnt=fixed), films, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/automan000/Convolutional_LSTM_PyTorch/issues/15",
    "first frame at each step",
    ("", "cell*"),
    (*UNREAD, "frame", "same input", "depend", "ignored"),
)
def first_frame(fixed: bool) -> Subject:
    """With x = input at each step the film is one picture."""
    return subject(Film(each=fixed), films, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/jeshraghian/snntorch/pull/413",
    "reset by the spike less the threshold, in place of their product",
    ("first*", "second*", "cell*", ""),
    ("reset", "spike", "always", "thresh", *GROWING),
)
def snntorch(fixed: bool) -> Subject:
    """Without a spike the membrane is raised by the threshold, and neurons never rest."""

    class Leaky(nn.Module):
        """Returns spikes and the membrane; a smooth step stands in on the way back."""

        def forward(self, x: Tensor, membrane: Tensor) -> tuple[Tensor, Tensor]:
            over = membrane - 1.0
            smooth = (math.pi * over).atan() / math.pi
            spikes = (over > 0).float() + smooth - smooth.detach()
            reset = (spikes * 1.0 if fixed else spikes - 1.0).detach()
            return spikes, 0.9 * membrane + x - reset

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 10)
            self.cell = Leaky()

        def forward(self, x: Tensor) -> Tensor:
            a, b, count = torch.zeros(len(x), 64), torch.zeros(len(x), 10), torch.zeros(())
            for _ in range(8):
                spikes, a = self.cell(self.first(x.flatten(1)), a)
                said, b = self.cell(self.second(spikes), b)
                count = count + said
            return count

    return read(Model())
