// Random numbers of the emulated GPUs. Kernels of the CPU draw them, so they are those of a generator of the CPU.
#pragma once

#include <ATen/core/Generator.h>

namespace emulated_torch {

const at::Generator& default_generator(int gpu);
at::Generator new_generator(int gpu);
at::Generator drawn_from(const at::Generator& of_gpu);  // the generator of the CPU behind it

}  // namespace emulated_torch
