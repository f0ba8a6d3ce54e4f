#include <cstring>

#include "kernels/number_octet.h"
#include "kernels/pieces.h"
#include "kernels/update_octet.h"
#include "tests/kernels/device_backends.h"

namespace ballast::kernels {
namespace {

ConstNumbers numbers(const ConstView& view) { return {view.data(), view.count(), view.dtype()}; }
Numbers numbers(const View& view) { return {view.data(), view.count(), view.dtype()}; }

constexpr std::size_t groups_per_chunk = threads_per_chunk / threads_per_group;

template <class Body>
void each_thread(const Body& body) {
  for (unsigned thread = 0; thread < threads_per_chunk; ++thread) {
    body(thread);
  }
}

template <class Body>
void each_place(const Stretch& all, const Body& body) {
  for (std::size_t chunk = 0; chunk < all.chunks_end; ++chunk) {
    each_thread([&](unsigned thread) { body(place_in(all, chunk, thread)); });
  }
}

template <StateFormat format, class Rule>
void update_chunk(const UpdateTable<Rule>& table, std::size_t chunk) {
  std::vector<OctetStep> steps(threads_per_chunk);
  std::vector<Largest> largest(groups_per_chunk);
  each_thread([&](unsigned thread) {
    steps[thread] = begin_step<format>(table, chunk, thread);
    Largest& of_group = largest[thread / threads_per_group];
    of_group.momentum = max(of_group.momentum, steps[thread].largest.momentum);
    of_group.root = max(of_group.root, steps[thread].largest.root);
  });
  each_thread(
      [&](unsigned thread) { end_step<format>(table, steps[thread], thread, largest[thread / threads_per_group]); });
}

void quantize_chunk(const ConstNumbers& from, const QuantizedPiece& to, const CodeRounding& rounding,
                    const Stretch& all, std::size_t chunk) {
  std::vector<std::uint32_t> largest(groups_per_chunk);
  each_thread([&](unsigned thread) {
    std::uint32_t& of_group = largest[thread / threads_per_group];
    of_group = max(of_group, largest_magnitude(load_floats(from, place_in(all, chunk, thread))));
  });
  each_thread([&](unsigned thread) {
    const OctetPlace place = place_in(all, chunk, thread);
    const GroupScale scale = group_scale(largest[thread / threads_per_group], to.bits);
    const std::uint64_t index = rounding.first_index + place.first;
    const Octet codes = to_codes(load_floats(from, place), scale, to.bits, rounding, index);
    store_quantized(to, from.count, place, scale, codes);
  });
}

double squares_of_group(const float* group) {
  double lanes[square_lanes];
  for (unsigned lane = 0; lane < square_lanes; ++lane) {
    lanes[lane] = squares_of_lane(group, lane);
  }
  for (unsigned distance = square_lanes / 2; distance > 0; distance /= 2) {
    for (unsigned lane = 0; lane < distance; ++lane) {
      lanes[lane] = lanes[lane] + lanes[lane + distance];
    }
  }
  return lanes[0];
}

// Adds the squares of all that octet_of(chunk, thread) returns, unless there is no sum for them.
template <class OctetOf>
void add_squares(std::size_t chunks, ExactSum* into, const OctetOf& octet_of) {
  std::vector<float> floats(chunk_size);
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    each_thread([&](unsigned thread) {
      const FloatOctet octet = octet_of(chunk, thread);
      std::copy_n(octet.at, octet_size, floats.begin() + static_cast<std::ptrdiff_t>(thread * octet_size));
    });
    for (std::size_t group = 0; into != nullptr && group < groups_per_chunk; ++group) {
      add(*into, squares_of_group(floats.data() + group * group_size));
    }
  }
  if (into != nullptr) carry(*into);
}

class OctetBackend : public Backend {
 public:
  void update(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) override {
    check_update(tile, runs, groups);
    each_table(tile, runs, groups, [](const auto& table) {
      for (std::size_t chunk = 0; chunk < chunks(table.runs); ++chunk) {
        switch (table.tile.format) {
          case StateFormat::fp32: update_chunk<StateFormat::fp32>(table, chunk); break;
          case StateFormat::split: update_chunk<StateFormat::split>(table, chunk); break;
          case StateFormat::bf16: update_chunk<StateFormat::bf16>(table, chunk); break;
          case StateFormat::compact: update_chunk<StateFormat::compact>(table, chunk); break;
          case StateFormat::four_bit: update_chunk<StateFormat::four_bit>(table, chunk); break;
        }
      }
    });
  }

  void cast(const ConstView& from, const View& to) override {
    const bool aligned = is_octet_aligned(numbers(from)) && is_octet_aligned(numbers(to));
    each_place(whole_array(to.count(), aligned),
               [&](const OctetPlace& place) { cast_octet(numbers(from), numbers(to), place); });
  }

  void clear(const View& to) override { std::memset(to.data(), 0, to.bytes()); }

  using Backend::accumulate_stochastic;
  using Backend::sum;
  void sum(std::span<const ConstView> from, const View& into, bool continues, ExactSum* squares) override {
    std::size_t left = from.size();
    each_pass({from, continues}, 0, into.count(), [&](const Summands& summands) {
      left -= summands.arrays;
      const Stretch all = whole_array(into.count(), is_octet_aligned(summands) && is_octet_aligned(numbers(into)));
      add_squares(all.chunks_end, left == 0 ? squares : nullptr, [&](std::size_t chunk, unsigned thread) {
        return sum_octet(summands, numbers(into), place_in(all, chunk, thread));
      });
    });
  }

  void accumulate_stochastic(const ConstView& from, const View& into, std::span<const Run> runs,
                             const RoundingPlace& place, ExactSum* squares) override {
    each_accumulate_table(numbers(from), numbers(into), runs, place, [&](const AccumulateTable& table) {
      add_squares(chunks(table.runs), squares,
                  [&](std::size_t chunk, unsigned thread) { return accumulate_in_chunk(table, chunk, thread); });
    });
  }

  void sum_of_squares(const ConstView& values, ExactSum* into) override {
    const Stretch all = whole_array(values.count(), is_octet_aligned(numbers(values)));
    add_squares(all.chunks_end, into, [&](std::size_t chunk, unsigned thread) {
      return load_floats(numbers(values), place_in(all, chunk, thread));
    });
  }

  void first_non_finite(const ConstView& values, std::uint64_t first_index, std::uint64_t* first) override {
    each_place(whole_array(values.count(), is_octet_aligned(numbers(values))), [&](const OctetPlace& place) {
      const Octet patterns = load_octet(numbers(values), place);
      *first = std::min(*first, first_non_finite_of(patterns, infinity_of(values.dtype()), first_index + place.first));
    });
  }

  void quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding) override {
    const Stretch all = whole_array(from.count(), is_octet_aligned(numbers(from)));
    for (std::size_t chunk = 0; chunk < all.chunks_end; ++chunk) {
      quantize_chunk(numbers(from), {to.bits, to.blocks.data()}, rounding, all, chunk);
    }
  }

  void dequantize(const ConstQuantized& from, const View& to) override {
    each_place(whole_array(to.count(), is_octet_aligned(numbers(to))), [&](const OctetPlace& place) {
      if (place.count > 0) store_floats(numbers(to), place, load_quantized({from.bits, from.blocks.data()}, place));
    });
  }

  void sum_quantized(std::span<const ConstView> from, CodeBits bits, const View& into) override {
    each_pass({from}, 0, into.count(), [&](const Summands& arrays) {
      each_place(whole_array(into.count(), is_octet_aligned(numbers(into))), [&](const OctetPlace& place) {
        sum_quantized_octet({arrays, bits}, numbers(into), place);
      });
    });
  }
};

class OctetsUnderTest : public TestBackend {
 public:
  std::string name() const override { return "octets"; }
  Backend& kernels() override { return backend_; }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    const std::align_val_t alignment{64};
    return {static_cast<std::byte*>(::operator new(bytes, alignment)),
            [=](std::byte* memory) { ::operator delete(memory, alignment); }};
  }
  void write(std::byte* to, const void* from, std::size_t bytes) override {
    std::copy_n(static_cast<const std::byte*>(from), bytes, to);
  }
  void read(void* to, const std::byte* from, std::size_t bytes) override {
    std::copy_n(from, bytes, static_cast<std::byte*>(to));
  }

 private:
  OctetBackend backend_;
};

}  // namespace

void on_octets(const BackendTest& test) {
  OctetsUnderTest octets;
  INFO("on " << octets.name());
  test(octets);
}

}  // namespace ballast::kernels
