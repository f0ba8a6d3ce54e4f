#include "kernels/cuda_launch.cuh"
#include "kernels/update_octet.h"

namespace ballast::kernels {
namespace {

template <class Rule, StateFormat format>
__global__ void __launch_bounds__(threads_per_chunk) update_kernel(const __grid_constant__ UpdateTable<Rule> table) {
  each_chunk(chunks(table.runs), [&](std::size_t chunk) {
    const OctetStep step = begin_step<format>(table, chunk, threadIdx.x);
    Largest largest;
    if constexpr (has_scales(format)) {
      largest = {max_of_group(step.largest.momentum), max_of_group(step.largest.root)};
    }
    end_step<format>(table, step, threadIdx.x, largest);
  });
}

template <class Rule>
void launch_update(const Cuda& cuda, const UpdateTable<Rule>& table) {
  const auto with = [&]<StateFormat format> {
    launch<update_kernel<Rule, format>>(cuda, "launching an optimizer step", chunks(table.runs), table);
  };
  switch (table.tile.format) {
    case StateFormat::fp32: return with.template operator()<StateFormat::fp32>();
    case StateFormat::split: return with.template operator()<StateFormat::split>();
    case StateFormat::bf16: return with.template operator()<StateFormat::bf16>();
    case StateFormat::compact: return with.template operator()<StateFormat::compact>();
    case StateFormat::four_bit: return with.template operator()<StateFormat::four_bit>();
  }
}

}  // namespace

void update(const Cuda& cuda, const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) {
  each_table(tile, runs, groups, [&](const auto& table) { launch_update(cuda, table); });
}

}  // namespace ballast::kernels
