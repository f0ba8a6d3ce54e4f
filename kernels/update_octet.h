// The optimizer step of one CUDA thread: eight elements, read, updated and written back. It has two halves. Between
// them the sixteen threads of a group agree, if its moments share a scale, on the largest of its new moments.
#pragma once

#include "kernels/launch_tables.h"

namespace ballast::kernels {

// --- The elements of a thread ---

struct StoredOctet {  // the elements as they are stored in memory
  Octet gradient;
  Octet parameter;
  Octet master;
  Octet momentum;
  Octet variance;
};

struct NewOctet {  // decoded
  float master[octet_size];
  float momentum[octet_size];
  SecondMoment<float> variance[octet_size];
};

// Formats with scales: the patterns of the largest new moments, of a thread and then of the group.
struct Largest {
  std::uint32_t momentum = 0;
  std::uint32_t root = 0;
};

// --- Memory ---

template <StateFormat format>
struct StateTypes;
template <>
struct StateTypes<StateFormat::fp32> {
  using Master = std::uint32_t;
  using Moment = std::uint32_t;
};
template <>
struct StateTypes<StateFormat::split> {
  using Master = std::uint16_t;
  using Moment = std::uint32_t;
};
template <>
struct StateTypes<StateFormat::bf16> {
  using Master = std::uint16_t;
  using Moment = std::uint16_t;
};
template <>
struct StateTypes<StateFormat::compact> {
  using Master = std::uint8_t;
  using Moment = std::uint8_t;
};
template <>
struct StateTypes<StateFormat::four_bit> {
  using Master = std::uint8_t;
  using Moment = Nibble;
};

constexpr std::byte* master_of(const TileMemory& tile) {
  return tile.parameter_dtype == DType::fp32 ? tile.parameter : tile.master;
}

template <class Rule, StateFormat format, bool Whole>
constexpr StoredOctet read_stored(const TileMemory& tile, const OctetPlace& place) {
  using Types = StateTypes<format>;
  StoredOctet stored{};
  stored.gradient = tile.gradient_dtype == DType::fp32 ? load_octet<std::uint32_t, Whole>(tile.gradient, place)
                                                       : load_octet<std::uint16_t, Whole>(tile.gradient, place);
  if constexpr (!MakesDirection<Rule>) {
    stored.master = load_octet<typename Types::Master, Whole>(master_of(tile), place);
    if constexpr (format != StateFormat::fp32) {
      stored.parameter = load_octet<std::uint16_t, Whole>(tile.parameter, place);
    }
  }
  if constexpr (Rule::has_momentum) {
    stored.momentum = load_octet<typename Types::Moment, Whole>(tile.momentum, place);
  }
  if constexpr (Rule::has_variance) {
    stored.variance = load_octet<typename Types::Moment, Whole>(tile.variance, place);
  }
  return stored;
}

template <class Rule, StateFormat format, bool Whole>
constexpr void write_stored(const TileMemory& tile, const OctetPlace& place, const StoredOctet& stored) {
  using Types = StateTypes<format>;
  if constexpr (!MakesDirection<Rule>) {
    store_octet<typename Types::Master, Whole>(master_of(tile), place, stored.master);
  }
  if (format != StateFormat::fp32 || tile.parameter_dtype != DType::fp32) {
    store_octet<std::uint16_t, Whole>(tile.parameter, place, stored.parameter);
  }
  if constexpr (Rule::has_momentum) {
    store_octet<typename Types::Moment, Whole>(tile.momentum, place, stored.momentum);
  }
  if constexpr (Rule::has_variance) {
    store_octet<typename Types::Moment, Whole>(tile.variance, place, stored.variance);
  }
}

// --- Numbers ---

constexpr float decode_gradient(std::uint32_t stored, DType dtype, float factor) {
  const float gradient = dtype == DType::fp32   ? as_float(stored)
                         : dtype == DType::bf16 ? from_bf16(stored)
                                                : from_fp16(stored);
  return gradient * factor;
}

template <StateFormat format>
constexpr float decode_master(std::uint32_t parameter, std::uint32_t stored) {
  if constexpr (format == StateFormat::fp32) {
    return as_float(stored);
  } else if constexpr (master_bytes(format) == 1) {
    return join8(shift_left<16>(parameter), extend_sign<8>(stored));
  } else {
    return join16(shift_left<16>(parameter) | stored);
  }
}

template <StateFormat format>
constexpr float decode_momentum(std::uint32_t stored, float scale) {
  if constexpr (has_scales(format)) {
    return MomentCodes<format>::Momentum::decode(stored, scale);
  } else if constexpr (format == StateFormat::bf16) {
    return from_bf16(stored);
  } else {
    return as_float(stored);
  }
}

template <StateFormat format>
constexpr SecondMoment<float> decode_variance(std::uint32_t stored, float scale) {
  if constexpr (has_scales(format)) {
    const float root = MomentCodes<format>::Root::decode(stored, scale);
    return {root * root, root};
  } else if constexpr (format == StateFormat::bf16) {
    return {from_bf16(stored), 0.0f};
  } else {
    return {as_float(stored), 0.0f};
  }
}

struct Scales {
  float momentum = 0.0f;
  float variance = 0.0f;
};

template <class Rule, StateFormat format>
constexpr Scales read_scales(const TileMemory& tile, std::size_t group) {
  Scales scales;
  if constexpr (has_scales(format) && Rule::has_momentum) {
    scales.momentum = tile.momentum_scales[group];
  }
  if constexpr (has_scales(format) && Rule::has_variance) {
    scales.variance = tile.variance_scales[group];
  }
  return scales;
}

// Decodes and updates an octet. The step is passed by value so that its coefficients stay in registers.
template <StateFormat format, class Rule>
constexpr NewOctet update_octet(const StoredOctet& stored, const RunStep<Rule> step, DType gradient_dtype,
                                const Scales& scales) {
  NewOctet updated{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    const float gradient = decode_gradient(stored.gradient.at[i], gradient_dtype, step.gradient_factor);
    if constexpr (!MakesDirection<Rule>) {
      updated.master[i] = decode_master<format>(stored.parameter.at[i], stored.master.at[i]);
    }
    if constexpr (Rule::has_momentum) {
      updated.momentum[i] = decode_momentum<format>(stored.momentum.at[i], scales.momentum);
    }
    if constexpr (Rule::has_variance) {
      updated.variance[i] = decode_variance<format>(stored.variance.at[i], scales.variance);
    }
    step.rule(updated.master[i], updated.momentum[i], updated.variance[i], gradient);
  }
  return updated;
}

template <class Rule>
constexpr Largest largest_of(const NewOctet& updated) {
  Largest largest;
  for (std::size_t i = 0; i < octet_size; ++i) {
    if constexpr (Rule::has_momentum) {
      largest.momentum = max(largest.momentum, bits(magnitude(updated.momentum[i])));
    }
    if constexpr (Rule::has_variance) {
      largest.root = max(largest.root, bits(updated.variance[i].root));
    }
  }
  return largest;
}

template <class Rule, StateFormat format>
constexpr void write_scales(const TileMemory& tile, std::size_t group, const Largest& largest) {
  if constexpr (Rule::has_momentum) {
    tile.momentum_scales[group] = MomentCodes<format>::Momentum::scale(as_float(largest.momentum));
  }
  if constexpr (Rule::has_variance) {
    tile.variance_scales[group] = MomentCodes<format>::Root::scale(as_float(largest.root));
  }
}

struct Factors {
  float momentum = 0.0f;
  float root = 0.0f;
};

template <StateFormat format>
constexpr Factors factors_of(const Largest& largest) {
  if constexpr (has_scales(format)) {
    return {MomentCodes<format>::Momentum::factor(as_float(largest.momentum)),
            MomentCodes<format>::Root::factor(as_float(largest.root))};
  }
  return {};
}

// Encodes an octet. `largest` is that of the group; the random bits are those of `place`.
template <class Rule, StateFormat format>
constexpr StoredOctet encode_octet(const NewOctet& updated, const TileMemory& tile, const RoundingPlace& place,
                                   const Largest& largest) {
  [[maybe_unused]] const std::uint64_t index = place.first_index;
  [[maybe_unused]] const RoundingKey key = rounding_key(place.stream, index);
  [[maybe_unused]] const Factors factors = factors_of<format>(largest);
  StoredOctet stored{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    const float master = updated.master[i];
    const float momentum = updated.momentum[i];
    const SecondMoment<float>& variance = updated.variance[i];
    [[maybe_unused]] const std::uint32_t random = random_bits(static_cast<std::uint32_t>(index + i), key);
    if constexpr (MakesDirection<Rule>) {
      stored.parameter.at[i] = to_bf16(master);
    } else if constexpr (has_scales(format)) {
      const auto parts = split8(master, random);
      stored.parameter.at[i] = shift_right<16>(parts.parameter);
      stored.master.at[i] = parts.remainder;
    } else {
      stored.parameter.at[i] = tile.parameter_dtype == DType::fp16 ? to_fp16(master) : to_bf16_parameter(master);
      stored.master.at[i] = format == StateFormat::fp32 ? bits(master) : split16(master);
    }
    if constexpr (has_scales(format)) {
      stored.momentum.at[i] = MomentCodes<format>::Momentum::encode(momentum, factors.momentum, random);
      stored.variance.at[i] = MomentCodes<format>::Root::encode(variance.root, factors.root, random);
    } else if constexpr (format == StateFormat::bf16) {
      stored.momentum.at[i] = shift_right<16>(add_noise(flush(momentum), random & 0xffffu));
      stored.variance.at[i] = shift_right<16>(add_noise(variance.value, shift_right<16>(random)));
    } else {
      stored.momentum.at[i] = bits(flush(momentum));
      stored.variance.at[i] = bits(variance.value);
    }
  }
  return stored;
}

// --- A thread's step ---

struct OctetStep {
  OctetPlace place;
  RoundingPlace rounding;
  NewOctet updated;
  Largest largest;  // the largest values of this thread
};

template <StateFormat format, class Rule>
constexpr OctetStep begin_step(const UpdateTable<Rule>& table, std::size_t chunk, unsigned thread) {
  const TileMemory& tile = table.tile;
  const std::size_t run = stretch_of(table.runs, chunk);
  OctetStep step{};
  step.place = place_of(table.runs, run, chunk, thread);
  step.rounding = table.steps[run].tile;
  step.rounding.first_index += step.place.first;
  const StoredOctet stored = step.place.whole ? read_stored<Rule, format, true>(tile, step.place)
                                              : read_stored<Rule, format, false>(tile, step.place);
  const Scales scales =
      step.place.count > 0 ? read_scales<Rule, format>(tile, step.place.first / group_size) : Scales{};
  step.updated = update_octet<format>(stored, table.steps[run], tile.gradient_dtype, scales);
  if constexpr (has_scales(format)) {
    step.largest = largest_of<Rule>(step.updated);
  }
  return step;
}

template <StateFormat format, class Rule>
constexpr void end_step(const UpdateTable<Rule>& table, const OctetStep& step, unsigned thread,
                        const Largest& largest_of_group) {
  const TileMemory& tile = table.tile;
  const OctetPlace& place = step.place;
  if constexpr (has_scales(format)) {
    if (thread % threads_per_group == 0 && place.count > 0) {
      write_scales<Rule, format>(tile, place.first / group_size, largest_of_group);
    }
  }
  const StoredOctet stored = encode_octet<Rule, format>(step.updated, tile, step.rounding, largest_of_group);
  if (place.whole) {
    write_stored<Rule, format, true>(tile, place, stored);
  } else {
    write_stored<Rule, format, false>(tile, place, stored);
  }
}

}  // namespace ballast::kernels
