"""Every model that the guide names, in chapter 7 and Table 3, and what the suite runs for it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class GuideModel:
    """A model of the guide.

    Attributes:
        where: in the guide.
        tasks: of the suite, that stand for it.
        run: what of its structure they have.
        not_run: what they have not, and why.
    """

    name: str
    where: str
    tasks: tuple[str, ...]
    run: str
    not_run: str


SMALL = "the published size and data set (a data set to download, days on a GPU)"

MODELS = (
    GuideModel(
        "multi-layer perceptron, MNIST", "7.5.1", ("adversarial",),
        "a perceptron is the critic there; fully connected layers are in every transformer here too",
        "784-200-10 on MNIST (a data set to download): an example of CNTK, which is not a framework of this project",
    ),
    GuideModel(
        "ResNet-50 v1.5", "7.3.2, 7.4 to 7.6, Table 3", ("classifier",),
        "bottlenecks with the stride in the 3 x 3, batch norm; 8 x 8 scans of digits", f"ImageNet, 50 layers: {SMALL}",
    ),
    GuideModel(
        "ResNeXt101-32x4d", "7.1.3", ("classifier",),
        "the second bottleneck in 4 groups", f"101 layers, 32 groups, ImageNet: {SMALL}",
    ),
    GuideModel(
        "SE-ResNeXt101-32x4d", "7.1.3", ("classifier",),
        "the second bottleneck with squeeze and excitation", f"101 layers, ImageNet: {SMALL}",
    ),
    GuideModel(
        "U-Net Industrial", "7.2.3, Table 3", ("segmentation",),
        "one level down and up with a skip, 8 and 16 channels, batch norm; the ink of digits on photographs",
        f"DAGM 2007: {SMALL}",
    ),
    GuideModel(
        "U-Net Medical", "7.2.3", ("segmentation",), "the same net", f"four levels, EM slices: {SMALL}",
    ),
    GuideModel(
        "SSD300 v1.1", "7.1.3", ("detection",),
        "two feature maps, 45 default boxes, hard negative mining, offsets and classes; digits on photographs, mAP",
        f"ResNet-50 backbone, six maps, COCO: {SMALL}",
    ),
    GuideModel(
        "SSD320 v1.2, SSD-RN50-FPN-640", "7.2.2, 7.2.3, Table 3", ("detection",),
        "the same net", f"feature pyramid, focal loss, COCO: {SMALL}",
    ),
    GuideModel(
        "Multibox SSD (VGG-D)", "Figures 2 and 3", ("detection",),
        "the same loss", "the VGG backbone; histograms of gradients are `fxamp profile`'s, not this suite's",
    ),
    GuideModel(
        "SSD of GluonCV", "7.3.1", ("detection",), "the same net", f"MXNet is not a framework of this project; {SMALL}",
    ),
    GuideModel(
        "bigLSTM", "Figure 1", ("recurrent_lm",),
        "LSTM language model, one layer of 64, loss curve in the plot", f"2 x 8192 cells, 1 B words: {SMALL}",
    ),
    GuideModel(
        "NVIDIA Sentiment Analysis", "Table 1", ("recurrent_lm",),
        "its first half, the character model",
        "the multiplicative LSTM (in tests/zoo, tools/count and docs/speed.md), and reviews: none come with Python",
    ),
    GuideModel(
        "FAIRSeq", "Table 1", ("transformer_lm", "translation"),
        "transformer language model (two layers of 32); translation with attention (hidden 24)",
        f"convolutional seq2seq, WMT: {SMALL}",
    ),
    GuideModel(
        "Transformer", "7.1.3", ("transformer_lm",),
        "the decoder's causal blocks, norms first, two layers of 32, over subwords",
        f"encoder and decoder, WMT: {SMALL}",
    ),
    GuideModel(
        "BERT", "7.1.3, 7.2.3", ("masked_lm",),
        "encoder with norms last, tied head, 15 % hidden; two layers of 32; Unicode names word by word",
        f"12 layers of 768, next-sentence loss: {SMALL}",
    ),
    GuideModel(
        "BERT Q&A", "Table 2, Table 3", ("masked_lm",),
        "its pre-training", "fine-tuning on SQuAD: needs pre-trained weights and a download",
    ),
    GuideModel(
        "GNMT v2", "Tables 1 to 3, 7.1.3, 7.2.3", ("translation",),
        "bidirectional first layer, residual LSTMs of 24, additive attention on the decoder's first; real names, made "
        "translations (snake_case to camelCase), accuracy of characters",
        f"WMT16, BLEU, 4 + 4 layers of 1024: {SMALL}",
    ),
    GuideModel(
        "NCF", "7.1.3, 7.2.3, Table 2, Table 3", ("recommender",),
        "NeuMF with factors of 16, leave one out, hit rate at 10 of 100 as in Table 3; which module uses which name",
        f"MovieLens 20M: {SMALL}",
    ),
    GuideModel(
        "Jasper", "7.1.3", ("speech",),
        "1-d convolutions of 24, batch norm, dropout, two residual blocks, CTC; the frames are columns of handwriting",
        "sound: no recorded speech comes with Python; 54 layers",
    ),
    GuideModel(
        "Tacotron 2", "7.1.3, Table 3", ("spectrogram",),
        "convolution and LSTM encoder, location attention, two LSTM cells, postnet, at hidden 32; four frames a step; "
        "the frames are columns of handwriting", "speech (LJ Speech), stop tokens, hidden 1024",
    ),
    GuideModel(
        "WaveGlow v1.1", "7.1.3, Table 3", ("flow",),
        "two flows of width 16, conditioned couplings, weight norm, 1 x 1 mixing; the waves are rows of photographs",
        "sound (LJ Speech); 12 flows of width 512",
    ),
    GuideModel(
        "GAN with two optimizers", "not in the guide", ("adversarial",),
        "convolutional generator, a perceptron as critic, both converted, one scaler", "-",
    ),
)  # fmt: skip
"""In the order of the tasks."""
