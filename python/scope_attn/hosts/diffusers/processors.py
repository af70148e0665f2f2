"""Two processors that stand in the place of diffusers' own, which do not dispatch their attention: projections, norms and RoPE.

HunyuanVideo 1.5 makes a mask of tokens x tokens before it attends, 12.9 GB at 720p, and CogVideoX calls PyTorch itself. These end in
diffusers' dispatcher, with tokens before heads.
"""
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb


class Dispatching:
    """What diffusers' own dispatching processors have."""

    _attention_backend = _parallel_config = None

    def dispatch(self, q, k, v, mask):
        return dispatch_attention_fn(q, k, v, attn_mask=mask, backend=self._attention_backend, parallel_config=self._parallel_config)


class HunyuanVideo15(Dispatching):
    """[video | text], and a mask of the text's valid tokens, which come first."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        heads = attn.heads, -1
        q, k, v = (project(hidden_states).unflatten(2, heads) for project in (attn.to_q, attn.to_k, attn.to_v))
        q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (attn.norm_q(q), attn.norm_k(k)))
        text_q, text_k, text_v = (project(encoder_hidden_states).unflatten(2, heads)
                                  for project in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
        text_q, text_k = attn.norm_added_q(text_q), attn.norm_added_k(text_k)
        valid = torch.nn.functional.pad(attention_mask.bool(), (hidden_states.shape[1], 0), value=True)[:, None, None]
        q, k, v = (torch.cat(pair, 1) for pair in ((q, text_q), (k, text_k), (v, text_v)))
        out = self.dispatch(q, k, v, valid).flatten(2, 3).to(q.dtype)
        video, text = out.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], 1)
        return attn.to_out[1](attn.to_out[0](video)), attn.to_add_out(text)


class CogVideoX(Dispatching):
    """[text | video] without a mask; the video alone is rotated, in CogVideoX-2b nothing is."""

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask=None, image_rotary_emb=None):
        text = encoder_hidden_states.shape[1]
        joint = torch.cat([encoder_hidden_states, hidden_states], 1)
        q, k, v = attn.to_qkv(joint).chunk(3, -1) if attn.fused_projections else (attn.to_q(joint), attn.to_k(joint), attn.to_v(joint))
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
        if attn.norm_q is not None:
            q, k = attn.norm_q(q), attn.norm_k(k)
        if image_rotary_emb is not None:
            q, k = (torch.cat([x[:, :text], apply_rotary_emb(x[:, text:], image_rotary_emb, sequence_dim=1)], 1) for x in (q, k))
        out = self.dispatch(q, k, v, attention_mask)
        out = attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))
        return out[:, text:], out[:, :text]
