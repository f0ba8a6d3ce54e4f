// The CPU walk of the optimizer step, for any width of lanes S. It works group by group: it reads the gradient into a
// small array, then decodes, updates and encodes the state in registers, so memory is read and written once. An object for each
// state format reads a group of elements as fp32 lanes, and writes them back:
//
//   format           master           moments
//   fp32             Fp32Master       Fp32Moments
//   split            SplitMaster      Fp32Moments
//   bf16             SplitMaster      Bf16Moments
//   compact, 4bit    CompactMaster    CodedMoments
//
// A rule that makes a direction has a Direction in place of the master.
//
// Each object serves the group that begins at element `first` of the tile. If both master and moments round, they use
// different bits of an element's random bits.
#pragma once

#include <cstring>

#include "kernels/number_walk.h"
#include "kernels/state_math.h"
#include "kernels/update.h"

namespace ballast::kernels {

// The values that one pass over a group hands to the next, in the innermost cache, as the vectors of the format hold them: in
// pairs, or in the order of memory.
struct Scratch {
  alignas(64) float gradient[group_size];
  alignas(64) std::uint32_t random[group_size];
  alignas(64) float master[group_size];
  alignas(64) float momentum[group_size];
  alignas(64) float root[group_size];
};

// Two vectors of a tile: their first element, and its place in the scratch of their group.
struct Place {
  std::size_t element;
  std::size_t i;
  Scratch& scratch;
};

// --- Masters ---

template <class S>
class Fp32Master {
  using F = typename S::F;

 public:
  explicit Fp32Master(const TileMemory& tile)
      : master_(reinterpret_cast<float*>(tile.parameter_dtype == DType::fp32 ? tile.parameter : tile.master)),
        parameter_(reinterpret_cast<std::uint16_t*>(tile.parameter)),
        dtype_(tile.parameter_dtype),
        aligned_(reinterpret_cast<std::uintptr_t>(parameter_) % (2 * S::width) == 0) {}

  Two<F> read(std::size_t at) const { return load_two<S>(master_ + at); }

  void write(std::size_t at, const Two<F>& master) const {
    store_two<S>(master_ + at, master);
    if (dtype_ == DType::bf16) {
      write_parameter(parameter_ + at, {to_bf16_parameter(master.a), to_bf16_parameter(master.b)});
    } else if (dtype_ == DType::fp16) {
      write_parameter(parameter_ + at, {to_fp16(master.a), to_fp16(master.b)});
    }
  }

 private:
  // The parameter is written but never read here, so its stores bypass the caches. That saves reading its lines first.
  void write_parameter(std::uint16_t* to, const Two<typename S::U>& halves) const {
    if (aligned_) {
      S::stream(to, halves.a);
      S::stream(to + S::width, halves.b);
    } else {
      store_two<S>(to, halves);
    }
  }

  float* master_;
  std::uint16_t* parameter_;
  DType dtype_;
  bool aligned_;
};

template <class S, bool in_pairs>
class SplitMaster {
  using F = typename S::F;
  using U = typename S::U;

 public:
  explicit SplitMaster(const TileMemory& tile)
      : parameter_(reinterpret_cast<std::uint16_t*>(tile.parameter)),
        remainder_(reinterpret_cast<std::uint16_t*>(tile.master)) {}

  Two<F> read(std::size_t at) const {
    const std::uint16_t *const high = parameter_ + at, *const low = remainder_ + at;
    if constexpr (in_pairs) {
      return join_pairs(S::load_pairs(high), S::load_pairs(low));
    } else {
      return {join16(S::load_halves(high, low)), join16(S::load_halves(high + S::width, low + S::width))};
    }
  }

  void write(std::size_t at, const Two<F>& master) const {
    std::uint16_t *const high = parameter_ + at, *const low = remainder_ + at;
    if constexpr (in_pairs) {
      const Two<U> rounded{rounded_parameter(master.a), rounded_parameter(master.b)};
      S::store_pairs(high, upper_halves(rounded));
      S::store_pairs(low, remainders_of(lower_halves(rounded)));
    } else {
      S::store_halves(high, low, split16(master.a));
      S::store_halves(high + S::width, low + S::width, split16(master.b));
    }
  }

 private:
  std::uint16_t* parameter_;
  std::uint16_t* remainder_;
};

template <class S>
class CompactMaster {
  using F = typename S::F;
  using U = typename S::U;

 public:
  explicit CompactMaster(const TileMemory& tile)
      : parameter_(reinterpret_cast<std::uint16_t*>(tile.parameter)),
        remainder_(reinterpret_cast<std::uint8_t*>(tile.master)) {}

  Two<F> read(std::size_t at) const {
    return join_pairs(S::load_pairs(parameter_ + at), shift_left<8>(remainder_.load(at)));
  }
  // Remainders are bytes, which take two times two vectors to fill one.
  void write(const Place& at, const Two<F>& first, const Two<F>& second) const {
    const auto write_parameters = [&](std::size_t offset, const Two<F>& master) {
      const Two<U> random = load_two<S>(at.scratch.random + at.i + offset);
      const auto a = split8(master.a, random.a), b = split8(master.b, random.b);
      S::store_pairs(parameter_ + at.element + offset, upper_halves<U>({a.parameter, b.parameter}));
      return pack_low_bits<8, U>({a.remainder, b.remainder});
    };
    remainder_.store(at.element, write_parameters(0, first), write_parameters(2 * S::width, second));
  }

 private:
  std::uint16_t* parameter_;
  CodeArray<S, 8> remainder_;
};

// A direction in place of a parameter. Nothing is read.
template <class S, bool in_pairs>
class Direction {
  using F = typename S::F;
  using U = typename S::U;

 public:
  explicit Direction(const TileMemory& tile) : direction_(reinterpret_cast<std::uint16_t*>(tile.parameter)) {}

  Two<F> read(std::size_t) const { return {F(0.0f), F(0.0f)}; }
  void write(std::size_t at, const Two<F>& direction) const {
    const Two<U> halves{to_bf16(direction.a), to_bf16(direction.b)};
    if constexpr (in_pairs) {
      S::store_pairs(direction_ + at, lower_halves(halves));
    } else {
      store_two<S>(direction_ + at, halves);
    }
  }

 private:
  std::uint16_t* direction_;
};

// --- Moments ---

template <class S>
class Fp32Moments {
  using F = typename S::F;

 public:
  static constexpr bool rounds = false;
  static constexpr bool in_pairs = false;
  static constexpr bool have_scales = false;

  explicit Fp32Moments(const TileMemory& tile)
      : momenta_(reinterpret_cast<float*>(tile.momentum)), variances_(reinterpret_cast<float*>(tile.variance)) {}

  Two<F> momentum(std::size_t at) const { return load_two<S>(momenta_ + at); }
  Two<F> variance(std::size_t at) const { return load_two<S>(variances_ + at); }
  void write_momentum(const Place& at, const Two<F>& m) const {
    store_two<S>(momenta_ + at.element, Two<F>{flush(m.a), flush(m.b)});
  }
  void write_variance(const Place& at, const SecondMoment<F>& a, const SecondMoment<F>& b) const {
    store_two<S>(variances_ + at.element, Two<F>{a.value, b.value});
  }

 private:
  float* momenta_;
  float* variances_;
};

template <class S>
class Bf16Moments {
  using F = typename S::F;
  using U = typename S::U;

 public:
  static constexpr bool rounds = true;
  static constexpr bool in_pairs = true;
  static constexpr bool have_scales = false;

  explicit Bf16Moments(const TileMemory& tile)
      : momenta_(reinterpret_cast<std::uint16_t*>(tile.momentum)),
        variances_(reinterpret_cast<std::uint16_t*>(tile.variance)) {}

  Two<F> momentum(std::size_t at) const { return load_two_numbers<S, Bf16Format, true>(momenta_ + at); }
  Two<F> variance(std::size_t at) const { return load_two_numbers<S, Bf16Format, true>(variances_ + at); }
  void write_momentum(const Place& at, const Two<F>& m) const {
    const Two<U> random = load_two<S>(at.scratch.random + at.i);
    const auto rounded = [](F x, U bits) { return add_noise(flush(x), bits & U(0xffffu)); };
    S::store_pairs(momenta_ + at.element, upper_halves<U>({rounded(m.a, random.a), rounded(m.b, random.b)}));
  }
  void write_variance(const Place& at, const SecondMoment<F>& a, const SecondMoment<F>& b) const {
    const Two<U> random = load_two<S>(at.scratch.random + at.i);
    const auto rounded = [](F x, U bits) { return add_noise(x, shift_right<16>(bits)); };
    S::store_pairs(variances_ + at.element, upper_halves<U>({rounded(a.value, random.a), rounded(b.value, random.b)}));
  }

 private:
  std::uint16_t* momenta_;
  std::uint16_t* variances_;
};

// The scale of a group is known only when all its new moments are known. Until then they stay as fp32 in the scratch.
template <class S, StateFormat format>
class CodedMoments {
  using F = typename S::F;
  using U = typename S::U;

  // Decodes four bits by a table of the group, because it costs less than the formula.
  template <class Code, bool of_roots>
  struct Array {
    static constexpr bool has_table = Code::bits_of_code == 4;

    Array(std::byte* bytes, float* scales_of_groups)
        : codes(reinterpret_cast<std::uint8_t*>(bytes)), scales(scales_of_groups) {}

    void begin(std::size_t element) {
      old_scale = F(scales[element / group_size]);
      largest = U(0u);
      if constexpr (has_table) {
        alignas(64) float values[16];
        for (std::uint32_t code = 0; code < 16; code += S::width) {
          S::store(values + code, stands_for(Code::decode(S::lane_numbers() + U(code), old_scale)));
        }
        table = S::table(values);
      }
    }
    Two<F> read(std::size_t at) const {
      const U pairs = codes.load(at);
      if constexpr (has_table) {
        return {S::look_up(table, pairs), S::look_up(table, shift_right<4>(pairs))};
      } else {
        const Two<F> decoded = Code::decode_pairs(pairs, old_scale);
        return {stands_for(decoded.a), stands_for(decoded.b)};
      }
    }
    static F stands_for(F decoded) { return of_roots ? decoded * decoded : decoded; }
    void compare(F a, F b) { largest = max(largest, max(bits(a), bits(b))); }
    void find_scale(std::size_t element) {
      const float of_group = as_float(S::max_of_lanes(largest));
      scales[element / group_size] = Code::scale(of_group);
      factor = F(Code::factor(of_group));
    }
    void encode(const Place& at, const float* moments) const {
      const auto encoded = [&](std::size_t offset) {
        return Code::encode_pairs(load_two<S>(moments + offset), factor,
                                  load_two<S>(at.scratch.random + at.i + offset));
      };
      codes.store(at.element, encoded(0), encoded(2 * S::width));
    }

    CodeArray<S, Code::bits_of_code> codes;
    float* scales;
    F old_scale{};
    U largest{};
    F factor{};
    typename S::Table table{};
  };

 public:
  static constexpr bool rounds = true;
  static constexpr bool in_pairs = true;
  static constexpr bool have_scales = true;

  explicit CodedMoments(const TileMemory& tile)
      : momenta_(tile.momentum, tile.momentum_scales), roots_(tile.variance, tile.variance_scales) {}

  template <class Rule>
  void begin(std::size_t element) {
    if constexpr (Rule::has_momentum) momenta_.begin(element);
    if constexpr (Rule::has_variance) roots_.begin(element);
  }
  Two<F> momentum(std::size_t at) const { return momenta_.read(at); }
  Two<F> variance(std::size_t at) const { return roots_.read(at); }
  void write_momentum(const Place&, const Two<F>& m) { momenta_.compare(magnitude(m.a), magnitude(m.b)); }
  void write_variance(const Place&, const SecondMoment<F>& a, const SecondMoment<F>& b) {
    roots_.compare(a.root, b.root);
  }
  template <class Rule>
  void find_scales(std::size_t element) {
    if constexpr (Rule::has_momentum) momenta_.find_scale(element);
    if constexpr (Rule::has_variance) roots_.find_scale(element);
  }
  // Encodes two times two vectors.
  template <class Rule>
  void encode(const Place& at) const {
    if constexpr (Rule::has_momentum) momenta_.encode(at, at.scratch.momentum + at.i);
    if constexpr (Rule::has_variance) roots_.encode(at, at.scratch.root + at.i);
  }

 private:
  Array<typename MomentCodes<format>::Momentum, false> momenta_;
  Array<typename MomentCodes<format>::Root, true> roots_;
};

// --- The step ---

// This is inlined because a call would move all coefficients from registers to memory and back.
template <class S, bool in_pairs>
[[gnu::always_inline]] inline void read_gradient(const TileMemory& tile, std::size_t first, float factor, float* to) {
  using F = typename S::F;
  const auto read = [&]<class Format>(Format) {
    const auto* const from = reinterpret_cast<const typename Format::Stored*>(tile.gradient) + first;
    for (std::size_t i = 0; i < group_size; i += 2 * S::width) {
      const Two<F> g = load_two_numbers<S, Format, in_pairs>(from + i);
      store_two<S>(to + i, Two<F>{g.a * F(factor), g.b * F(factor)});
    }
  };
  switch (tile.gradient_dtype) {
    case DType::fp32: return read(Fp32Format{});
    case DType::bf16: return read(Bf16Format{});
    default: return read(Fp16Format{});
  }
}

// The two passes over a group: the first updates the moments, the second the master, and encodes what a scale had to wait for.
// Each waits for a root or for a quotient only, so the processor looks far enough ahead to fill the time. A rule that is one
// formula computes all in the first pass.
// The rule is kept by value so that its coefficients stay in registers across the stores.
template <class S, class Master, class Moments, class Rule>
struct Passes {
  using F = typename S::F;

  void update_moments(const Place& at) {
    const Two<F> g = load_two<S>(at.scratch.gradient + at.i);
    Two<F> m{}, v{};
    if constexpr (Rule::has_momentum) m = moments.momentum(at.element);
    if constexpr (Rule::has_variance) v = moments.variance(at.element);
    SecondMoment<F> va{v.a, F{}}, vb{v.b, F{}};
    if constexpr (UpdatesMomentsFirst<Rule>) {
      rule.update_moments(m.a, va, g.a);
      rule.update_moments(m.b, vb, g.b);
    } else {
      Two<F> p = master.read(at.element);
      rule(p.a, m.a, va, g.a);
      rule(p.b, m.b, vb, g.b);
      store_two<S>(at.scratch.master + at.i, p);
    }
    if constexpr (Rule::has_momentum) {
      store_two<S>(at.scratch.momentum + at.i, m);
      moments.write_momentum(at, m);
    }
    if constexpr (Rule::has_variance) {
      store_two<S>(at.scratch.root + at.i, Two<F>{va.root, vb.root});
      moments.write_variance(at, va, vb);
    }
  }

  Two<F> new_master(const Place& at) const {
    if constexpr (UpdatesMomentsFirst<Rule>) {
      const Two<F> p = master.read(at.element);
      const Two<F> m = load_two<S>(at.scratch.momentum + at.i), root = load_two<S>(at.scratch.root + at.i);
      return {rule.updated_master(p.a, m.a, root.a), rule.updated_master(p.b, m.b, root.b)};
    } else {
      return load_two<S>(at.scratch.master + at.i);
    }
  }

  // Updates two times two vectors.
  void update_master(const Place& at) const {
    const Place next{at.element + 2 * S::width, at.i + 2 * S::width, at.scratch};
    const Two<F> first = new_master(at), second = new_master(next);
    if constexpr (requires { master.write(at, first, second); }) {
      master.write(at, first, second);
    } else {
      master.write(at.element, first);
      master.write(next.element, second);
    }
    if constexpr (Moments::have_scales) moments.template encode<Rule>(at);
  }

  const Rule rule;
  const Master master;
  Moments moments;
};

// Everything is inlined because a call would move all coefficients from registers to memory and back.
template <class S, class Master, class Moments, class Rule>
[[gnu::flatten]] void update_each_group(const TileMemory& tile, const Rule& rule, float gradient_factor) {
  Passes<S, Master, Moments, Rule> passes{rule, Master(tile), Moments(tile)};
  Scratch scratch;
  for (std::size_t first = 0; first < tile.count; first += group_size) {
    const auto place = [&](std::size_t i) -> Place { return {first + i, i, scratch}; };
    const auto draw = [&] { draw_random_bits<S>(tile.rounding_stream, tile.first_index + first, scratch.random); };
    read_gradient<S, Moments::in_pairs>(tile, first, gradient_factor, scratch.gradient);
    if constexpr (Moments::have_scales) {
      passes.moments.template begin<Rule>(first);
    } else if constexpr (Moments::rounds) {
      draw();
    }
    for (std::size_t i = 0; i < group_size; i += 2 * S::width) {
      passes.update_moments(place(i));
    }
    if constexpr (Moments::have_scales) {
      passes.moments.template find_scales<Rule>(first);
      draw();  // overlaps the long chain of operations that computes the scales
    }
    for (std::size_t i = 0; i < group_size; i += 4 * S::width) {
      passes.update_master(place(i));
    }
  }
}

template <class S, class Rule>
void update_groups(const TileMemory& tile, const Rule& rule, float gradient_factor) {
  const auto with = [&]<class Master, class Moments>() {
    using Written = std::conditional_t<MakesDirection<Rule>, Direction<S, Moments::in_pairs>, Master>;
    update_each_group<S, Written, Moments>(tile, rule, gradient_factor);
  };
  using enum StateFormat;
  switch (tile.format) {
    case fp32: return with.template operator()<Fp32Master<S>, Fp32Moments<S>>();
    case split: return with.template operator()<SplitMaster<S, false>, Fp32Moments<S>>();
    case bf16: return with.template operator()<SplitMaster<S, true>, Bf16Moments<S>>();
    case compact: return with.template operator()<CompactMaster<S>, CodedMoments<S, compact>>();
    case four_bit: return with.template operator()<CompactMaster<S>, CodedMoments<S, four_bit>>();
  }
}

// Updates the last, incomplete group of a run. It works on a copy padded to a whole group, and copies only the real
// elements back.
template <class S, class Rule>
void update_tail(const TileMemory& tail, const Rule& rule, float gradient_factor) {
  alignas(64) std::byte copies[5][4 * group_size]{};  // of each array
  TileMemory used = tail;
  if constexpr (!Rule::has_momentum) used.momentum = nullptr;
  if constexpr (!Rule::has_variance) used.variance = nullptr;
  TileMemory group = used;
  group.count = group_size;
  // The unused half of a last byte is no element of the group: it is read and written as zero.
  const auto copy = [&](std::byte* to, const std::byte* from, std::size_t bits) {
    const std::size_t bytes = (tail.count * bits + 7) / 8;
    std::memcpy(to, from, bytes);
    if (tail.count * bits % 8 != 0) to[bytes - 1] &= std::byte{0xf};
  };
  std::size_t next = 0;
  each_array(group, [&](auto*& array, std::size_t bits) {
    std::byte* const here = copies[next++];
    if (array == nullptr) return;
    copy(here, array, bits);
    array = here;
  });
  update_groups<S>(group, rule, gradient_factor);
  next = 0;
  each_array(used, [&](auto*& array, std::size_t bits) {
    const std::byte* const here = copies[next++];
    if constexpr (std::is_same_v<decltype(array), std::byte*&>) {  // not the gradient
      if (array != nullptr) copy(array, here, bits);
    }
  });
}

// Updates one run on the calling thread.
template <class S>
void update_run(const TileMemory& tile, const GroupStep& step) {
  const std::size_t whole = tile.count / group_size * group_size;
  std::visit(
      [&](const auto& rule) {
        update_groups<S>(part(tile, 0, whole), rule, step.gradient_factor);
        if (whole < tile.count) {
          update_tail<S>(part(tile, whole, tile.count - whole), rule, step.gradient_factor);
        }
      },
      step.rule);
  S::finish_streams();
}

}  // namespace ballast::kernels
