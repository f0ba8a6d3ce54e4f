#include "kernels/cast_table.h"
#include "kernels/cuda_launch.cuh"

namespace ballast::kernels {
namespace {

template <std::size_t capacity>
__global__ void __launch_bounds__(threads_per_chunk) cast_kernel(const __grid_constant__ CastTable<capacity> table) {
  each_chunk(chunks(table.stretches), [&](std::size_t chunk) { cast_in_chunk(table, chunk, threadIdx.x); });
}

template <std::size_t capacity>
void launch_casts(const Cuda& cuda, const CastTable<capacity>& table) {
  launch<cast_kernel<capacity>>(cuda, "launching casts", chunks(table.stretches), table);
}

}  // namespace

void cast(const Cuda& cuda, const CastTask& task) {
  CastTable<1> table;
  add_cast(table, task);
  launch_casts(cuda, table);
}

void cast_all(const Cuda& cuda, std::span<const CastTask> tasks) {
  each_cast_table(tasks, [&](const auto& table) { launch_casts(cuda, table); });
}

}  // namespace ballast::kernels
