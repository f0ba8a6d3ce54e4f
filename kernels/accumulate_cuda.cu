#include "kernels/accumulate_octet.h"
#include "kernels/cuda_launch.cuh"

namespace ballast::kernels {
namespace {

__global__ void __launch_bounds__(threads_per_chunk)
    accumulate_kernel(ConstNumbers from, float scale, Numbers into, Stretch all) {
  each_chunk(all.chunks_end,
             [&](std::size_t chunk) { accumulate_octet(from, scale, into, place_in(all, chunk, threadIdx.x)); });
}

__global__ void __launch_bounds__(threads_per_chunk)
    sum_kernel(const __grid_constant__ Summands from, Numbers into, Stretch all) {
  each_chunk(all.chunks_end, [&](std::size_t chunk) { sum_octet(from, into, place_in(all, chunk, threadIdx.x)); });
}

__global__ void __launch_bounds__(threads_per_chunk)
    accumulate_stochastic_kernel(const __grid_constant__ AccumulateTable table) {
  each_chunk(chunks(table.runs), [&](std::size_t chunk) { accumulate_in_chunk(table, chunk, threadIdx.x); });
}

}  // namespace

void accumulate(const Cuda& cuda, const ConstNumbers& from, float scale, const Numbers& into) {
  const Stretch all = whole_array(into.count, is_octet_aligned(from) && is_octet_aligned(into));
  launch<accumulate_kernel>(cuda, "launching an accumulation", all.chunks_end, from, scale, into, all);
}

void sum(const Cuda& cuda, const Summands& from, const Numbers& into) {
  const Stretch all = whole_array(into.count, is_octet_aligned(from) && is_octet_aligned(into));
  launch<sum_kernel>(cuda, "launching a sum of arrays", all.chunks_end, from, into, all);
}

void accumulate_stochastic(const Cuda& cuda, const ConstNumbers& from, const Numbers& into, std::span<const Run> runs,
                           const RoundingPlace& place) {
  each_accumulate_table(from, into, runs, place, [&](const AccumulateTable& table) {
    launch<accumulate_stochastic_kernel>(cuda, "launching a stochastic accumulation", chunks(table.runs), table);
  });
}

}  // namespace ballast::kernels
