"""Which parameters `muon_groups` gives to AdamW, and why: of layers of torch, and of models of transformers."""

import pytest
import torch
from torch import nn

import fusedstep

BERT = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 32, "max_position_embeddings": 128}
LLAMA = {**BERT, "num_key_value_heads": 1}
GPT2 = {"vocab_size": 96, "n_positions": 128, "n_embd": 16, "n_layer": 2, "n_head": 2}
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
VIT |= {"image_size": 8, "patch_size": 4}
WHISPER = {"vocab_size": 96, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8}
WHISPER |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 20}
WHISPER |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_target_positions": 120}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
MAMBA = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2}
WAV = {"vocab_size": 32, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 4}
WAV |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
WAV |= {"conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3]}
UNTIED = {"tie_word_embeddings": False}

WORDS, PLACES, HEAD = "an embedding", "an embedding", "a head"
OF_BERT = {f"bert.embeddings.{name}_embeddings.weight": WORDS for name in ("word", "position", "token_type")}
OF_ROBERTA = {name.replace("bert.", "roberta.", 1): why for name, why in OF_BERT.items()}
OF_LLAMA = {"model.embed_tokens.weight": WORDS}
OF_WHISPER = {"model.decoder.embed_tokens.weight": WORDS, "model.decoder.embed_positions.weight": PLACES}
OF_GPT2 = {"transformer.wte.weight": WORDS, "transformer.wpe.weight": PLACES}
OF_VIT = {"vit.embeddings.cls_token": "an embedding", "vit.embeddings.position_embeddings": PLACES}
MIXER = "backbone.layers.0.mixer"
OF_MAMBA = {
    "backbone.embeddings.weight": WORDS,
    f"{MIXER}.conv1d.weight": "a depthwise convolution",
    f"{MIXER}.A_log": "rates of a recurrence",
}

# the class, of transformers, and what its configuration gets; what AdamW steps that is no vector; and what Muon
# steps that is no matrix
MODELS = {
    "Bert tied": ("BertForMaskedLM", BERT, OF_BERT, {}),
    "Bert untied": ("BertForMaskedLM", BERT | UNTIED, {**OF_BERT, "cls.predictions.decoder.weight": HEAD}, {}),
    "Bert of two heads": (
        "BertForPreTraining",
        BERT | UNTIED,
        {**OF_BERT, "cls.predictions.decoder.weight": HEAD, "cls.seq_relationship.weight": HEAD},
        {},
    ),
    "Bert without a head": (
        "BertModel",
        BERT,
        {name.removeprefix("bert."): why for name, why in OF_BERT.items()},
        {},
    ),
    "Roberta that classifies": (
        "RobertaForSequenceClassification",
        BERT | {"num_labels": 3},
        {**OF_ROBERTA, "classifier.out_proj.weight": HEAD},
        {},
    ),
    "Roberta untied": (
        "RobertaForMaskedLM",
        BERT | UNTIED,
        {**OF_ROBERTA, "lm_head.decoder.weight": HEAD},
        {},
    ),
    "DistilBert that classifies": (
        "DistilBertForSequenceClassification",
        {"vocab_size": 96, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32},
        {
            "distilbert.embeddings.word_embeddings.weight": WORDS,
            "distilbert.embeddings.position_embeddings.weight": PLACES,
            "classifier.weight": HEAD,
        },
        {},
    ),
    "GPT2 tied": ("GPT2LMHeadModel", GPT2, OF_GPT2, {}),
    "GPT2 untied": ("GPT2LMHeadModel", GPT2 | UNTIED, {**OF_GPT2, "lm_head.weight": HEAD}, {}),
    "Llama": ("LlamaForCausalLM", LLAMA, {**OF_LLAMA, "lm_head.weight": HEAD}, {}),
    "Llama tied": ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True}, OF_LLAMA, {}),
    "Llama that classifies": (
        "LlamaForSequenceClassification",
        LLAMA | {"pad_token_id": 0, "num_labels": 3},
        {**OF_LLAMA, "score.weight": HEAD},
        {},
    ),
    "Mixtral": (
        "MixtralForCausalLM",
        LLAMA | {"num_local_experts": 4, "num_hidden_layers": 1},
        {**OF_LLAMA, "lm_head.weight": HEAD},
        {f"model.layers.0.mlp.experts.{name}_proj": "experts" for name in ("gate_up", "down")},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        LLAMA | {"num_local_experts": 4, "num_hidden_layers": 1, "head_dim": 8},
        {
            **OF_LLAMA,
            "lm_head.weight": HEAD,
            **{f"model.layers.0.mlp.experts.{name}_proj_bias": "a bias" for name in ("gate_up", "down")},
        },
        {f"model.layers.0.mlp.experts.{name}_proj": "experts" for name in ("gate_up", "down")},
    ),
    "ViT": (
        "ViTForImageClassification",
        VIT | {"num_labels": 5},
        {**OF_VIT, "classifier.weight": HEAD},
        {"vit.embeddings.patch_embeddings.projection.weight": "a convolution"},
    ),
    "Swin": (
        "SwinForImageClassification",
        SWIN | {"num_labels": 5, "use_absolute_embeddings": True},
        {
            "swin.embeddings.position_embeddings": PLACES,
            "swin.encoder.layers.0.blocks.0.attention.relative_position_bias.relative_position_bias_table": (
                "a bias"
            ),
            "classifier.weight": HEAD,
        },
        {"swin.embeddings.patch_embeddings.projection.weight": "a convolution"},
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        WHISPER,
        OF_WHISPER,
        {f"model.encoder.conv{i}.weight": "a convolution" for i in (1, 2)},
    ),
    "Whisper untied": (
        "WhisperForConditionalGeneration",
        WHISPER | UNTIED,
        {**OF_WHISPER, "proj_out.weight": HEAD},
        {f"model.encoder.conv{i}.weight": "a convolution" for i in (1, 2)},
    ),
    "Wav2Vec2": (
        "Wav2Vec2ForCTC",
        WAV,
        {
            "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original0": "one row or column",
            "lm_head.weight": HEAD,
        },
        {
            **{f"wav2vec2.feature_extractor.conv_layers.{i}.conv.weight": "a convolution" for i in (0, 1)},
            "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original1": "a convolution",
        },
    ),
    "Mamba": ("MambaForCausalLM", MAMBA, OF_MAMBA, {}),
    "Mamba untied": ("MambaForCausalLM", MAMBA | UNTIED, {**OF_MAMBA, "lm_head.weight": HEAD}, {}),
    "ResNet": (
        "ResNetForImageClassification",
        RESNET | {"num_labels": 5},
        {"classifier.1.weight": HEAD},
        {
            "resnet.embedder.embedder.convolution.weight": "a convolution",
            "resnet.encoder.stages.0.layers.0.layer.0.convolution.weight": "a convolution",
            "resnet.encoder.stages.0.layers.0.layer.1.convolution.weight": "a convolution",
            "resnet.encoder.stages.1.layers.0.shortcut.convolution.weight": "a convolution",
            "resnet.encoder.stages.1.layers.0.layer.0.convolution.weight": "a convolution",
            "resnet.encoder.stages.1.layers.0.layer.1.convolution.weight": "a convolution",
        },
    ),
}


def placed(groups, which):
    """The names of what Muon steps, or of what AdamW steps that is no vector, with the reasons."""
    names = (name for group in groups if group["use_muon"] is which for name, _ in group["params"])
    return {name: groups.reasons[name] for name in names if groups.reasons[name] != "a vector"}


def check(model, adamw, muon=None):
    groups = fusedstep.muon_groups(model)
    assert placed(groups, False) == adamw
    found = placed(groups, True)
    assert {name: why for name, why in found.items() if why != "a matrix"} == (muon or {})
    # all others of two dimensions or more, and each parameter once
    matrices = {name for name, p in model.named_parameters() if p.dim() > 1 and p.requires_grad}
    assert {*found} == matrices - {*adamw}
    fusedstep.Muon(groups)
    # the table, which stays when the groups have an optimizer
    lines = {line.split()[0]: line for line in str(groups).splitlines()}
    assert {*lines} == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, line in lines.items():
        assert line.split()[1] == ("Muon" if name in found else "AdamW")
        assert line.endswith(f"  {groups.reasons[name]}")
    return groups


@pytest.mark.parametrize(("name", "options", "adamw", "muon"), MODELS.values(), ids=MODELS)
def test_models_of_transformers_are_sorted_by_their_layers(name, options, adamw, muon):
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model = cls(cls.config_class(**options))
    check(model, adamw, muon)


def of(**layers):
    """A model that has these modules, or parameters."""
    model = nn.Module()
    for name, layer in layers.items():
        setattr(model, name, layer)
    return model


def test_a_convolution_is_flattened_whatever_its_dimensions():
    layers = [nn.Conv1d(3, 8, 5), nn.Conv2d(3, 8, 5), nn.Conv3d(3, 8, 5)]
    layers += [nn.ConvTranspose1d(3, 8, 5), nn.ConvTranspose2d(3, 8, 5), nn.ConvTranspose3d(3, 8, 5)]
    groups = check(nn.Sequential(*layers), {}, {f"{i}.weight": "a convolution" for i in range(6)})
    assert [g.get("flatten") for g in groups if g["use_muon"]] == [True]


def test_a_convolution_of_groups_is_cut_into_these_and_one_of_single_channels_is_adamws():
    cut, single = nn.Conv1d(6, 12, 3, groups=3), nn.Conv1d(6, 6, 3, groups=6)
    model = nn.Sequential(nn.Conv1d(1, 6, 3), cut, single, nn.Conv2d(4, 8, 3, groups=4), nn.Linear(4, 4))
    depthwise = {"2.weight": "a depthwise convolution", "3.weight": "a depthwise convolution"}
    groups = check(model, depthwise, {"0.weight": "a convolution", "1.weight": "a convolution"})
    assert [(g.get("flatten"), g.get("num_heads")) for g in groups if g["use_muon"]] == [
        (None, None),
        (True, None),
        (True, 3),
    ]
    # as three convolutions side by side
    optimizer, before = fusedstep.Muon(groups, weight_decay=0.0), cut.weight.detach().clone()
    cut.weight.grad = torch.randn_like(cut.weight)
    optimizer.step()
    for part, old, grad in zip(cut.weight.split(4), before.split(4), cut.weight.grad.split(4), strict=True):
        alone = nn.Parameter(old.clone())
        alone.grad = grad.clone()
        fusedstep.Muon([alone], flatten=True).step()
        torch.testing.assert_close(part, alone)


def test_norms_and_biases_of_two_dimensions_are_adamws_and_not_decayed():
    model = of(norm=nn.LayerNorm((4, 5)), linear=nn.Linear(4, 4), expert_bias=nn.Parameter(torch.ones(3, 4)))
    adamw = {"norm.weight": "a norm", "norm.bias": "a norm", "expert_bias": "a bias"}
    groups = check(model, adamw)
    assert [g["weight_decay"] for g in groups if not g["use_muon"]] == [0.0]


def test_tokens_positions_and_other_tensors_that_are_no_matrices_of_a_layer_are_adamws():
    ones = lambda *shape: nn.Parameter(torch.ones(*shape))
    model = of(
        cls_token=ones(1, 1, 8),
        mask_token=ones(2, 8),
        pos_embed=ones(1, 16, 8),
        rel_pos_h=ones(7, 8),
        latents=ones(1, 16, 8),
        queries=nn.ParameterList([ones(1, 8)]),
        class_embeddings=nn.ParameterList([ones(4, 8)]),
        A_log=ones(8, 4),
        layer_scale=ones(8, 4),
        experts=ones(4, 8, 8),
        transpose_weight=ones(8, 8),
    )
    adamw = dict.fromkeys(("cls_token", "mask_token", "pos_embed", "rel_pos_h"), "an embedding")
    adamw |= {"class_embeddings.0": "an embedding", "latents": "no layer's, its first dimension is 1"}
    adamw |= {"queries.0": "one row or column", "A_log": "rates of a recurrence", "layer_scale": "a scale"}
    check(model, adamw, {"experts": "experts"})


def test_embeddings_and_all_that_is_tied_to_them_are_adamws():
    table, bag = nn.Embedding(96, 8), nn.EmbeddingBag(7, 8)
    first, second = nn.Linear(8, 96), nn.Linear(8, 96)
    first.weight = second.weight = table.weight
    model = of(first=first, second=second, hidden=nn.Linear(8, 8), bag=bag, table=table)
    # by the name that it has first
    check(model, {"first.weight": "an embedding", "bag.weight": "an embedding"})


HEADS = {
    "lm_head": of(hidden=nn.Linear(4, 4), lm_head=nn.Linear(4, 9)),
    "head": of(hidden=nn.Linear(4, 4), head=nn.Linear(4, 9)),
    "score": of(hidden=nn.Linear(4, 4), score=nn.Linear(4, 9)),
    "fc": of(hidden=nn.Linear(4, 4), fc=nn.Linear(4, 9)),
    "output": of(hidden=nn.Linear(4, 4), output=nn.Linear(4, 9)),
    "classifier.1": of(hidden=nn.Linear(4, 4), classifier=nn.Sequential(nn.Dropout(), nn.Linear(4, 9))),
    "head.fc": of(hidden=nn.Linear(4, 4), head=of(norm=nn.LayerNorm(4), fc=nn.Linear(4, 9))),
    "classifier": of(hidden=nn.Linear(4, 4), classifier=nn.Conv2d(4, 9, 1)),
    # as many outputs as there are words, though it comes before other layers
    "unembed": of(words=nn.Embedding(9, 4), unembed=nn.Linear(4, 9), blocks=nn.ModuleList([nn.Linear(4, 4)])),
}


@pytest.mark.parametrize(("name", "model"), HEADS.items(), ids=HEADS)
def test_heads_are_known_by_their_names_and_by_the_number_of_words(name, model):
    words = {"words.weight": "an embedding"} if name == "unembed" else {}
    check(model, {f"{name}.weight": "a head", **words})


def test_layers_with_similar_names_are_no_heads():
    block = lambda: of(attn_head=nn.Linear(9, 9), fc=nn.Linear(9, 9), output=of(dense=nn.Linear(9, 9)))
    wide = nn.ModuleList([block(), block()])
    # the inner layers are as wide as there are words, and so are positions as there are outputs
    model = of(
        words=nn.Embedding(9, 9), positions=nn.Embedding(16, 9), pre_classifier=nn.Linear(9, 16), wide=wide
    )
    check(model, {"words.weight": "an embedding", "positions.weight": "an embedding"})
    check(of(fc=nn.Linear(4, 4), output=nn.Linear(4, 4), attn_head=nn.Linear(4, 4)), {})


def test_one_row_or_column_is_adamws():
    check(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), {"1.weight": "one row or column"})


def test_wrappers_change_nothing():
    model = of(words=nn.Embedding(9, 4), hidden=nn.Linear(4, 4), fc=nn.Linear(4, 7))
    plain = fusedstep.muon_groups(model)
    wrapped = fusedstep.muon_groups(torch.compile(model))
    assert wrapped.reasons == {f"_orig_mod.{name}": why for name, why in plain.reasons.items()}


def test_takes_and_leaves_have_the_last_word():
    model = of(
        words=nn.Embedding(9, 4), w1=nn.Linear(4, 4), w2=nn.Linear(4, 4), conv=nn.Conv1d(4, 4, 3, groups=4)
    )
    chosen = fusedstep.muon_groups(model, takes=lambda name, p: name.startswith(("words", "conv")))
    assert placed(chosen, True) == {"words.weight": "a matrix", "conv.weight": "a convolution"}
    assert placed(chosen, False) == {f"w{i}.weight": "left out by `takes`" for i in (1, 2)}
    for leaves in ("*w1*", ["*w1*"], ("*w1*",), (pattern for pattern in ["*w1*"])):
        left = fusedstep.muon_groups(model, leaves=leaves)
        assert placed(left, True) == {"w2.weight": "a matrix"}
        assert placed(left, False)["w1.weight"] == "left out by `leaves`"
    both = fusedstep.muon_groups(model, takes=lambda name, p: True, leaves="w*")
    assert placed(both, True) == {"conv.weight": "a convolution"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"takes": "*w*"}, r"given takes='\*w\*'; use a function of name and parameter.*or leaves="),
        ({"takes": ["*w*"]}, r"given takes=\['\*w\*'\]"),
        ({"leaves": 3}, "given leaves=3; use a pattern for names of parameters"),
        ({"leaves": None}, "given leaves=None"),
        ({"leaves": ["*w*", 3]}, r"given leaves=\['\*w\*', 3\]"),
    ],
    ids=str,
)
def test_what_chooses_nothing_is_refused(wrong, message):
    with pytest.raises(TypeError, match=message):
        fusedstep.muon_groups(nn.Linear(2, 2), **wrong)
