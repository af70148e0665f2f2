// Kernels between the linear layers of a video model; contracts as in video/engine.h. Columns are multiples of 4, rows of a
// matrix on 16 bytes, types f32 and bf16, but for patches, and for `convert` into more columns, which become 0.
#pragma once

#include <span>

#include "core/random.h"
#include "video/matrix.h"

namespace scope::cuda {

void layer_norm(void* stream, video::Matrix x, const float* scale, const float* shift, float eps, video::Matrix out);
void add_norm(void* stream, video::Matrix x, video::Matrix y, const float* gate, const float* scale, const float* shift,
              float eps, video::Matrix out);
void rms_norm(void* stream, video::Matrix x, const float* weight, float eps, const float* rotation, int64_t head_dim,
              video::Matrix out);
void head_norm(void* stream, video::Matrix x, const float* weight, float eps, const float* rotation, int64_t head_dim,
               video::Matrix out);
void convert(void* stream, video::Matrix x, video::Matrix out);
// x = scale * e4m3 by rows, where the largest magnitude of a row becomes e4m3's, 448. A row of zeros: scale 1. A row with
// NaN or Inf: scale NaN. A largest below 2^-100 counts as that. out [rows, columns] on 4 bytes; for sm_89 and later.
void quantise_rows(void* stream, video::Matrix x, uint8_t* out, float* scales);
void add(void* stream, video::Matrix x, video::Matrix y, const float* gate);
void activate(void* stream, video::Matrix x, video::Activation then);  // in place
void modulation(void* stream, const float* table, const float* time, int64_t rows, int64_t columns, uint32_t plus_one,
                float* out);
void patchify(void* stream, const video::PatchGrid& grid, const float* latent, int64_t channels, const float* more,
              int64_t more_channels, video::Matrix out);
void unpatchify(void* stream, const video::PatchGrid& grid, video::Matrix x, int64_t channels, video::ChannelOrder order,
                float* latent);
void axpy(void* stream, float factor, const float* y, int64_t n, float* x);
void combine(void* stream, std::span<const video::Term> terms, int64_t n, float* out);
// x [rows, columns] = mean + deviation * normals, in the first `drawn` columns; any numbers of rows and columns.
void draw(void* stream, const RandomStream& from, float mean, float deviation, int64_t drawn, video::Matrix x);

}  // namespace scope::cuda
