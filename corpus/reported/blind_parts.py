"""Layers unused, shared, unregistered and cut off, as people reported them; each with its fix."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.small import flat, images, noisy, patients, rows, views, words
from corpus.subject import Subject, subject

SHELF = Shelf("reported", "blind")
GITHUB = "https://github.com"

UNUSED = ("never called", "not called", "unused", "read by", "nothing reads", "never read")
DROPPED = (*UNUSED, "dropped", "dead", "thrown", "reaches neither", "no effect")
CUT = ("gradient", "detach", "no_grad", "stop", "graph")
SHARED = ("shared", "same module", "one module", "names for", "several", "twice", "times", "tied")
LOST = ("register", "plain list", "plain attribute", "not a parameter", "no parameter", "knows")


def judged(model: nn.Module, draw: Any = images, loss: Any = F.cross_entropy) -> Subject:
    return subject(model, draw, loss, 32)


def conv(a: int, b: int, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(a, b, size, padding=size // 2)


class Head(nn.Module):
    """Pools a picture and classifies it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 10)

    def classify(self, x: Tensor) -> Tensor:
        return self.head(x.mean((2, 3)))


# ---- unused --------------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/inria-thoth/HySUPP/issues/3", "second layer forgotten in forward", "layer2", UNUSED
)
def misicnet(fixed: bool) -> Subject:
    """layer2 is made and never called."""

    class Net(Head):
        def __init__(self) -> None:
            super().__init__(16)
            self.layer1 = nn.Sequential(conv(1, 16), nn.BatchNorm2d(16), nn.LeakyReLU())
            self.layer2 = nn.Sequential(conv(16, 16), nn.BatchNorm2d(16), nn.LeakyReLU())
            self.layer3 = nn.Sequential(conv(16, 16), nn.BatchNorm2d(16), nn.LeakyReLU())

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer1(x)
            return self.classify(self.layer3(self.layer2(x) if fixed else x))

    return judged(Net())


@SHELF.report(
    f"{GITHUB}/NVlabs/PWC-Net/issues/110", "last deconvolution never called", "deconv1", UNUSED
)
def pwc_net(fixed: bool) -> Subject:
    """A deconvolution of the last level is made, and the level ends before it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([conv(1, 8), nn.Conv2d(8, 16, 2, 2), nn.Conv2d(16, 16, 2, 2)])
            self.deconv3 = nn.ConvTranspose2d(16, 16, 2, 2)
            self.deconv2 = nn.ConvTranspose2d(32, 8, 2, 2)
            self.predict = conv(16, 1)
            if not fixed:
                self.deconv1 = nn.ConvTranspose2d(16, 2, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            seen = []
            for layer in self.down:
                x = layer(x).relu()
                seen.append(x)
            x = torch.cat([self.deconv3(x).relu(), seen[1]], 1)
            return self.predict(torch.cat([self.deconv2(x).relu(), seen[0]], 1))

    return judged(Net(), noisy, F.binary_cross_entropy_with_logits)


@SHELF.report(
    f"{GITHUB}/NoamRosenberg/autodeeplab/pull/20",
    "loop over cells ends too early",
    "cells.*",
    UNUSED,
)
def autodeeplab(fixed: bool) -> Subject:
    """Of twelve cells eleven run."""

    class Net(Head):
        def __init__(self) -> None:
            super().__init__(12)
            self.stem, self.cells = conv(1, 12), nn.ModuleList(conv(12, 12) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for number in range(len(self.cells) - (0 if fixed else 1)):
                x = x + self.cells[number](x.relu())
            return self.classify(x)

    return judged(Net())


@SHELF.report(
    f"{GITHUB}/cyclomon/UNSB/issues/29",
    "each layer of the block gets the block's input",
    ("block*", "blocks*"),
    DROPPED,
)
def unsb(fixed: bool) -> Subject:
    """Out = layer(x) in place of out = layer(out): the last layer alone counts."""

    class Net(Head):
        def __init__(self) -> None:
            super().__init__(12)
            self.stem = conv(1, 12)
            self.block = nn.ModuleList(
                [conv(12, 12), nn.InstanceNorm2d(12), nn.ReLU(), conv(12, 12)]
            )

        def forward(self, x: Tensor) -> Tensor:
            x = out = self.stem(x)
            for layer in self.block:
                out = layer(out if fixed else x)
            return self.classify(x + out)

    return judged(Net())


@SHELF.report(
    f"{GITHUB}/deepchem/deepchem/issues/5091",
    "loop over layers that forgets what came before",
    "layers*",
    DROPPED,
)
def atomic_conv(fixed: bool) -> Subject:
    """X = layer(inputs) for each layer of a stack."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            self.head = nn.Linear(64, 10)

        def forward(self, inputs: Tensor) -> Tensor:
            x = inputs
            for layer in self.layers:
                x = layer(x if fixed else inputs).relu()
            return self.head(x)

    return judged(Net(), flat)


@SHELF.report(
    f"{GITHUB}/Cadene/pretrained-models.pytorch/issues/79",
    "outputs of activations never used",
    ("relu*", "act*"),
    DROPPED,
)
def bn_inception(fixed: bool) -> Subject:
    """self.relu(x) is called, and what it returned is not taken."""

    class Net(Head):
        def __init__(self) -> None:
            super().__init__(16)
            self.conv1, self.bn1, self.relu1 = conv(1, 16), nn.BatchNorm2d(16), nn.ReLU()
            self.conv2, self.bn2, self.relu2 = conv(16, 16), nn.BatchNorm2d(16), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.bn1(self.conv1(x))
            out = self.relu1(x)
            x = self.bn2(self.conv2(out if fixed else x))
            out = self.relu2(x)
            return self.classify(out if fixed else x)

    return judged(Net())


@SHELF.report(
    f"{GITHUB}/delira-dev/delira/issues/91",
    "residual network without residuals",
    ("", "block*"),
    ("residual", "skip", "fade", "vanish"),
)
def delira(fixed: bool) -> Subject:
    """Nothing is added to what the branch returns."""

    class Net(Head):
        def __init__(self) -> None:
            super().__init__(12)
            self.stem = conv(1, 12)
            self.block = nn.ModuleList(
                nn.Sequential(conv(12, 12), nn.BatchNorm2d(12), nn.ReLU(), conv(12, 12))
                for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.block:
                x = (x + block(x) if fixed else block(x)).relu()
            return self.classify(x)

    return judged(Net())


@SHELF.report(
    f"{GITHUB}/yuval-alaluf/restyle-encoder/issues/40",
    "loss = where loss += was meant",
    ("", "identity*"),
    (*DROPPED, *CUT),
)
def restyle(fixed: bool) -> Subject:
    """The term before is computed, and overwritten."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(64, 16), nn.Linear(16, 64)
            self.identity = nn.Linear(16, 10)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            code = self.encoder(x).relu()
            return self.decoder(code), self.identity(code)

    def total(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        loss = F.cross_entropy(output[1], target[1])
        again = F.mse_loss(output[0], target[0])
        return loss + again if fixed else again

    def draw(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        pixels, labels = flat(n)
        return pixels, (pixels, labels)

    return judged(Net(), draw, total)


# ---- in place ------------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/rosinality/vq-vae-2-pytorch/issues/60",
    "in-place activation that writes into its skip",
    ("block*", ""),
    ("in place", "in-place", "overwr", "wrote", "written"),
)
def vq_vae(fixed: bool) -> Subject:
    """The first ReLU of the branch changes the input that is added afterwards."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Sequential(
                nn.ReLU(inplace=not fixed), conv(12, 6), nn.ReLU(), conv(6, 12, 1)
            )

        def forward(self, x: Tensor) -> Tensor:
            out = self.conv(x)
            return out + x

    class Net(Head):
        def __init__(self) -> None:
            super().__init__(12)
            self.stem, self.block = conv(1, 12), nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.classify(self.block(self.stem(x)))

    return judged(Net())


# ---- shared --------------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/deep-learning-with-pytorch/dlwpt-code/issues/89",
    "[ResBlock()] * n",
    ("resblocks*",),
    SHARED,
)
def dlwpt(fixed: bool) -> Subject:
    """Multiplying a list copies references: all blocks are one."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = conv(12, 12), nn.BatchNorm2d(12)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)).relu() + x

    class Net(Head):
        def __init__(self) -> None:
            super().__init__(12)
            self.stem = conv(1, 12)
            blocks = [Block() for _ in range(5)] if fixed else [Block()] * 5
            self.resblocks = nn.Sequential(*blocks)

        def forward(self, x: Tensor) -> Tensor:
            return self.classify(self.resblocks(self.stem(x).relu()))

    return judged(Net())


@SHELF.report(
    f"{GITHUB}/linkedin/Liger-Kernel/pull/269", "heads that share their blocks", ("heads*",), SHARED
)
def medusa(fixed: bool) -> Subject:
    """nn.Sequential(*([ResBlock()] * layers)) in each of several heads."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.silu(self.linear(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(64, 32)
            shared = [Block(), Block()]
            self.heads = nn.ModuleList(
                nn.Sequential(*(copy.deepcopy(shared) if fixed else shared), nn.Linear(32, 10))
                for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.trunk(x).relu()
            return torch.stack([head(x) for head in self.heads]).mean(0)

    return judged(Net(), flat)


@SHELF.report(
    f"{GITHUB}/yassouali/pytorch-segmentation/pull/159",
    "decoder made of the very layers of the encoder",
    ("encoder*", "decoder*"),
    SHARED,
)
def segnet(fixed: bool) -> Subject:
    """Decoder = encoder copies the list, and not the layers."""

    class Net(Head):
        def __init__(self) -> None:
            super().__init__(12)
            self.stem = conv(1, 12)
            encoder = [
                conv(12, 12),
                nn.BatchNorm2d(12),
                nn.ReLU(),
                conv(12, 12),
                nn.BatchNorm2d(12),
            ]
            decoder = copy.deepcopy(encoder) if fixed else list(encoder)
            self.encoder, self.decoder = nn.Sequential(*encoder), nn.Sequential(*decoder)
            self.out = conv(12, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = F.max_pool2d(self.encoder(self.stem(x)), 2)
            return self.out(self.decoder(F.interpolate(x, scale_factor=2)))

    return judged(Net(), noisy, F.binary_cross_entropy_with_logits)


@SHELF.report(
    f"{GITHUB}/dreamquark-ai/tabnet/pull/76",
    "batch norm shared by steps of other inputs",
    ("steps*", "shared*"),
    SHARED,
)
def tabnet(fixed: bool) -> Subject:
    """Weights are shared by design, and batch normalisations with them, which is none."""

    class Step(nn.Module):
        def __init__(self, linear: nn.Linear, norm: nn.BatchNorm1d) -> None:
            super().__init__()
            self.linear, self.norm, self.own = linear, norm, nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(F.gelu(self.norm(self.linear(x))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            linear, norm = nn.Linear(24, 24), nn.BatchNorm1d(24)
            self.stem = nn.Linear(10, 24)
            self.steps = nn.ModuleList(
                Step(linear, nn.BatchNorm1d(24) if fixed else norm) for _ in range(3)
            )
            self.head = nn.Linear(24, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(sum(step(x * (i + 1)).relu() for i, step in enumerate(self.steps)))

    return judged(Net(), patients, F.mse_loss)


# ---- unregistered --------------------------------------------------------------------------------


@SHELF.report(f"{GITHUB}/pytorch/pytorch/issues/715", "layers in a plain list", ("", "hids*"), LOST)
def in_a_list(fixed: bool) -> Subject:
    """model.parameters() knows the classifier alone."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(64, 32), nn.Linear(32, 32)]
            self.hids = nn.ModuleList(layers) if fixed else layers
            self.classifier = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.hids:
                x = layer(x).relu()
            return self.classifier(x)

    return judged(Net(), flat)


@SHELF.report(
    f"{GITHUB}/pytorch/pytorch/issues/632", "parameters in a dictionary", ("", "w*"), LOST
)
def in_a_dictionary(fixed: bool) -> Subject:
    """Relations have their weights in a plain dictionary."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weights = {str(i): nn.Parameter(0.1 * torch.randn(64, 32)) for i in range(3)}
            self.w = nn.ParameterDict(weights) if fixed else weights
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(sum((x @ self.w[str(i)]).relu() for i in range(3)))

    return judged(Net(), flat)


@SHELF.report(
    f"{GITHUB}/ikostrikov/pytorch-meta-optimizer/issues/11",
    "recurrent cells in a list of their own",
    ("", "lstms*"),
    LOST,
)
def meta_optimizer(fixed: bool) -> Subject:
    """Cells of all layers are appended to a list, and never trained."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            cells = [nn.GRUCell(8, 24), nn.GRUCell(24, 24)]
            self.lstms = nn.ModuleList(cells) if fixed else cells
            self.head = nn.Linear(24, 10)

        def forward(self, x: Tensor) -> Tensor:
            states = [x.new_zeros(len(x), 24) for _ in self.lstms]
            for step in x.unbind(1):
                for i, cell in enumerate(self.lstms):
                    step = states[i] = cell(step, states[i])
            return self.head(states[-1])

    return judged(Net(), rows)


@SHELF.report(
    f"{GITHUB}/EleutherAI/gpt-neox/pull/267",
    "last layer that is no nn.Module",
    ("", "final*"),
    LOST,
)
def gpt_neox(fixed: bool) -> Subject:
    """The class of the head derives from object, so its weight is registered nowhere."""

    class Final(nn.Module if fixed else object):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(0.1 * torch.randn(10, 32))

        def __call__(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.final = nn.Embedding(18, 32), nn.Linear(32, 32), Final()

        def forward(self, ids: Tensor) -> Tensor:
            return self.final(self.mix(self.embed(ids)).relu().mean(1))

    return judged(Net(), words)


@SHELF.report(
    f"{GITHUB}/Project-MONAI/MONAI/pull/8578",
    "output layers made anew in each forward",
    ("", "out*"),
    (*LOST, "made in the forward", "made by the forward", "anew", "new parameter"),
)
def monai(fixed: bool) -> Subject:
    """self.out is overwritten by fresh layers whenever the model runs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(64, 32)
            self.out = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

        def forward(self, x: Tensor) -> Tensor:
            x = self.encoder(x).relu()
            if not fixed:
                self.out = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
            return self.out(x)

    return judged(Net(), flat)


@SHELF.report(
    f"{GITHUB}/pytorch/pytorch/issues/1291",
    "nn.Linear made inside of forward",
    ("",),
    (*LOST, "made in the forward", "made by the forward", "anew", "new parameter"),
)
def made_in_forward(fixed: bool) -> Subject:
    """Each call draws new weights for the middle layer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear1, self.linear3 = nn.Linear(64, 32), nn.Linear(32, 10)
            if fixed:
                self.linear2 = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear1(x).clamp(min=0)
            middle = self.linear2 if fixed else nn.Linear(32, 32)
            return self.linear3(middle(x).clamp(min=0))

    return judged(Net(), flat)


@SHELF.report(
    f"{GITHUB}/SimonThomine/RememberingNormality/issues/7",
    "memory of plain tensors",
    ("", "memory*"),
    (*LOST, "never learn", "constant", "plain tensor"),
)
def memories(fixed: bool) -> Subject:
    """Keys and values are torch.randn, and no parameters."""

    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            keys, values = torch.randn(20, 32) / 6, torch.randn(20, 32) / 6
            self.keys = nn.Parameter(keys) if fixed else keys
            self.values = nn.Parameter(values) if fixed else values

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.keys.T).softmax(-1) @ self.values

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.memory, self.head = nn.Linear(64, 32), Memory(), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.encoder(x).relu()
            return self.head(x + self.memory(x))

    return judged(Net(), flat)


# ---- gradients -----------------------------------------------------------------------------------


@SHELF.report(f"{GITHUB}/rll-research/cic/issues/5", "encoder under no_grad", ("encoder*",), CUT)
def cic(fixed: bool) -> Subject:
    """Observations are encoded without gradients while the encoder is to learn."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(conv(1, 8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32))
            self.policy = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(fixed and torch.is_grad_enabled()):
                x = self.encoder(x)
            return self.policy(x)

    return judged(Net())


@SHELF.report(
    f"{GITHUB}/queenie88/A-GCN/issues/4",
    "learnt adjacency detached",
    ("theta*", "phi*"),
    CUT,
)
def a_gcn(fixed: bool) -> Subject:
    """W_theta and W_phi make the graph, which is detached before it is used."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.theta, self.phi = (
                nn.Linear(8, 32),
                nn.Linear(32, 16),
                nn.Linear(32, 16),
            )
            self.weight, self.head = nn.Linear(32, 32), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            adjacency = (self.theta(x) @ self.phi(x).transpose(1, 2)).softmax(-1)
            adjacency = adjacency if fixed else adjacency.detach()
            return self.head((adjacency @ self.weight(x)).relu().mean(1))

    return judged(Net(), rows)


@SHELF.report(
    f"{GITHUB}/lucidrains/CoCa-pytorch/issues/6",
    "extractor that clones and detaches",
    ("vit*", "backbone*"),
    CUT,
)
def coca(fixed: bool) -> Subject:
    """A hook keeps a detached copy of the last hidden state, of which the rest is computed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32))
            self.head = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 10))
            self.kept: list[Tensor] = []
            self.backbone[2].register_forward_hook(self.keep)

        def keep(self, module: nn.Module, given: Any, output: Tensor) -> None:
            self.kept[:] = [output.clone() if fixed else output.clone().detach()]

        def forward(self, x: Tensor) -> Tensor:
            self.backbone(x)
            return self.head(self.kept.pop())

    return judged(Net(), flat)


@SHELF.report(
    f"{GITHUB}/dragen1860/IntroVAE-Pytorch/issues/3",
    "picture detached in the decoder's own loss",
    ("decoder*", ""),
    CUT,
)
def intro_vae(fixed: bool) -> Subject:
    """What the encoder says of a drawn picture is to train the decoder, and cannot."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
            self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            drawn = self.decoder(torch.randn(len(x), 8))
            return self.encoder(x), self.encoder(drawn if fixed else drawn.detach())

    def loss(output: tuple[Tensor, Tensor]) -> Tensor:
        real, drawn = output
        return real.pow(2).mean() + F.relu(1.0 - drawn.pow(2)).mean()

    return judged(Net(), lambda n: (flat(n)[0], None), loss)


@SHELF.report(
    f"{GITHUB}/jolibrain/joliGEN/pull/20",
    "term of the loss without a gradient",
    ("", "segment*"),
    (*CUT, "term"),
)
def joligen(fixed: bool) -> Subject:
    """A semantic loss is added whose prediction was detached to silence an error."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(conv(1, 8), nn.ReLU(), conv(8, 1))
            self.classify = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            made = x + self.generator(x)
            return made, self.classify(made if fixed else made.detach())

    def draw(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        pictures, labels = images(n)
        return pictures, (pictures, labels)

    def loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        return F.l1_loss(output[0], target[0]) + F.cross_entropy(output[1], target[1])

    return judged(Net(), draw, loss)


# ---- norms and states ----------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/reczoo/FuxiCTR/issues/23",
    "layer norm over fields and their features together",
    ("norm*",),
    ("two", "places", "axes", "dimensions", "mixes", "tokens", "several"),
)
def masknet(fixed: bool) -> Subject:
    """Each field's embedding was to be normalised by itself."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(18, 16)
            self.norm = nn.LayerNorm(16 if fixed else [32, 16])
            self.head = nn.Linear(512, 10)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.norm(self.embed(ids)).flatten(1))

    return judged(Net(), words)


@SHELF.report(
    f"{GITHUB}/tejaslodaya/timeseries-clustering-vae/issues/3",
    "state of the first layer in place of the last",
    ("rnn", ""),
    (*DROPPED, "gradient", "layer"),
)
def clustering(fixed: bool) -> Subject:
    """h_end[0] is the first layer's: nothing that the second computes is used."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(8, 24, num_layers=2, batch_first=True)
            self.head = nn.Linear(24, 10)

        def forward(self, x: Tensor) -> Tensor:
            _, last = self.rnn(x)
            return self.head(last[-1] if fixed else last[0])

    return judged(Net(), rows)


@SHELF.report(
    f"{GITHUB}/keitakurita/Better_LSTM_PyTorch/issues/6",
    "last sample in place of the last step",
    ("", "head", "rnn"),
    ("sample", "batch", "same for"),
)
def last_sample(fixed: bool) -> Subject:
    """outputs[-1] of a batch that comes first is all steps of one sample."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(8, 24, batch_first=True), nn.Linear(24, 10)

        def forward(self, x: Tensor) -> Tensor:
            outputs, _ = self.rnn(x)
            last = outputs[:, -1] if fixed else outputs[-1].mean(0, keepdim=True).expand(len(x), -1)
            return self.head(last)

    return judged(Net(), rows)


# ---- losses --------------------------------------------------------------------------------------

TWICE = ("softmax", "sigmoid", "logits", "probabilit", "twice")


@SHELF.report(
    f"{GITHUB}/mlelarge/graph_neural_net/pull/37",
    "softmax before cross entropy",
    ("", "*"),
    TWICE,
)
def graph_loss(fixed: bool) -> Subject:
    """Cross entropy takes logits, and is given probabilities."""
    layers = [nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)]
    return judged(nn.Sequential(*layers, *([] if fixed else [nn.Softmax(1)])), flat)


@SHELF.report(
    f"{GITHUB}/bifold-pathomics/xMIL/pull/8",
    "softmax in the loss function before F.cross_entropy",
    ("", "*"),
    TWICE,
)
def xmil(fixed: bool) -> Subject:
    """The user's loss makes probabilities first."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output if fixed else output.softmax(1), target)

    return judged(model, flat, loss)


def ink(n: int) -> tuple[Tensor, Tensor]:
    """Return noisy pixels, and whether each has ink."""
    pictures, masks = noisy(n)
    return pictures.flatten(1), masks.flatten(1)


@SHELF.report(
    f"{GITHUB}/avBuffer/UNet3plus_pth/issues/23",
    "sigmoid before a loss with logits",
    ("", "*"),
    TWICE,
)
def unet_plus(fixed: bool) -> Subject:
    """The model ends in a sigmoid, and the loss begins with one."""
    layers = [nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)]
    model = nn.Sequential(*layers, *([] if fixed else [nn.Sigmoid()]))
    return judged(model, ink, F.binary_cross_entropy_with_logits)


@SHELF.report(
    f"{GITHUB}/itakurah/focal-loss-pytorch/pull/5",
    "focal loss that takes the sigmoid twice",
    ("", "*"),
    TWICE,
)
def focal(fixed: bool) -> Subject:
    """Probabilities go into binary_cross_entropy_with_logits."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        chance = output.sigmoid()
        crossed = F.binary_cross_entropy_with_logits(
            output if fixed else chance, target, reduction="none"
        )
        right = chance * target + (1 - chance) * (1 - target)
        return ((1 - right) ** 2 * crossed).mean()

    return judged(model, ink, loss)


@SHELF.report(
    f"{GITHUB}/lightly-ai/lightly/pull/1341",
    "probabilities where kl_div takes their logarithm",
    ("", "*"),
    ("log", "kl_div", "probabilit", "positive"),
)
def pmsn(fixed: bool) -> Subject:
    """F.kl_div takes log-probabilities first."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss(output: Tensor) -> Tensor:
        mean = output.softmax(1).mean(0)
        prior = torch.arange(1, 11.0).reciprocal()
        return F.kl_div(mean.log() if fixed else mean, prior / prior.sum(), reduction="sum")

    return judged(model, lambda n: (flat(n)[0], None), loss)


@SHELF.report(
    f"{GITHUB}/jsboige/CoursIA/pull/926",
    "mse of (n, 1) and (n,)",
    ("", "*"),
    ("broadcast", "shape", "larger"),
)
def broadcast(fixed: bool) -> Subject:
    """Each prediction is held against the target of each sample."""
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

    def draw(n: int) -> tuple[Tensor, Tensor]:
        features, target = patients(n)
        return features, target if fixed else target[:, 0]

    return judged(model, draw, F.mse_loss)


@SHELF.report(
    f"{GITHUB}/benedekrozemberczki/pytorch_geometric_temporal/pull/233",
    "square by hand of (n, 1) less (n,)",
    ("", "*"),
    ("broadcast", "shape", "larger", "pairs"),
)
def temporal(fixed: bool) -> Subject:
    """torch.mean((y_hat - y) ** 2) over a square of samples."""
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output.squeeze(1) if fixed else output) - target[:, 0]).pow(2).mean()

    return judged(model, patients, loss)


@SHELF.report(
    f"{GITHUB}/wiseodd/generative-models/issues/43",
    "divergence taken away from the loss",
    ("", "*"),
    ("sign", "negative", "climb", "without bound", "maximis"),
)
def divergence(fixed: bool) -> Subject:
    """As the report would have it: reconstruction less the divergence, which then grows."""

    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(64, 16), nn.Linear(8, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, logvar = self.encoder(x).chunk(2, 1)
            z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
            return self.decoder(z), mean, logvar

    def loss(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
        again, mean, logvar = output
        kl = 0.5 * (mean.pow(2) + logvar.exp() - 1.0 - logvar).sum(1).mean()
        return F.mse_loss(again, target) + (kl if fixed else -kl)

    return judged(VAE(), lambda n: (flat(n)[0],) * 2, loss)


@SHELF.report(
    f"{GITHUB}/facebookresearch/flow_matching/pull/91",
    "likelihood under detach, so that nothing can be trained",
    ("", "velocity*"),
    CUT,
)
def flow_matching(fixed: bool) -> Subject:
    """Every step of the solver starts from a detached state."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.velocity = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 64))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + self.velocity(x) / 3
                x = x if fixed else x.detach()
            return x

    return judged(Flow(), lambda n: (flat(n)[0], None), lambda x: 0.5 * x.pow(2).sum(1).mean())


@SHELF.report(
    f"{GITHUB}/phanideepgampa/stacked-capsule-networks/pull/5",
    "softmax over an axis of one",
    ("attention*", "", "soft*"),
    ("softmax", "one value", "single", "always 1", "all 1", "constant"),
)
def capsules(fixed: bool) -> Subject:
    """softmax(2) of scores (batch, parts, 1): all weights are one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.attention, self.head = conv(1, 16), conv(16, 1, 1), nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).relu()
            scores = self.attention(x).flatten(2).transpose(1, 2)
            weights = scores.softmax(1 if fixed else 2)
            return self.head((weights * x.flatten(2).transpose(1, 2)).sum(1))

    return judged(Net())


@SHELF.report(
    f"{GITHUB}/iduta/iresnet/pull/2",
    "in-place activation before the identity is taken",
    ("block*", ""),
    ("in place", "in-place", "overwr", "wrote", "written"),
)
def iresnet(fixed: bool) -> Subject:
    """Identity = x, then relu(x) in place: both are the activation."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.conv = nn.ReLU(inplace=not fixed), conv(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            identity = x
            return self.conv(self.relu(x)) + identity

    class Net(Head):
        def __init__(self) -> None:
            super().__init__(12)
            self.stem, self.block = conv(1, 12), nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.classify(self.block(self.stem(x)))

    return judged(Net())


@SHELF.report(
    f"{GITHUB}/vturrisi/solo-learn/issues/135",
    "features detached for both losses",
    ("encoder*",),
    CUT,
)
def solo(fixed: bool) -> Subject:
    """Only the classifier was to see detached features: the projector does, too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
            self.projector = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            first, second = self.encoder(a), self.encoder(b)
            if not fixed:
                first, second = first.detach(), second.detach()
            z = [F.normalize(self.projector(x), dim=1) for x in (first, second)]
            return z[0] @ z[1].T / 0.2

    def loss(scores: Tensor) -> Tensor:
        return F.cross_entropy(scores, torch.arange(len(scores)))

    return judged(Net(), views, loss)
