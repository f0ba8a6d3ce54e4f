// The slots of a program: everything that lives in memory between steps, and the buffers that operations take turns with.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <set>
#include <span>

#include "kernels/exact_sum_math.h"
#include "kernels/runtime/host_pages.h"
#include "kernels/runtime/sizes.h"
#include "zero/plan/by_rates.h"
#include "zero/plan/collective_memory.h"
#include "zero/plan/compile_input.h"
#include "zero/plan/matrix_homes.h"
#include "zero/plan/program.h"

namespace ballast {

// Full parameters that are gathered begin at multiples of this, for GPUs and wide CPU instructions.
inline constexpr std::size_t gathered_alignment = 256;

// Buffers of one kind that operations use in turn: slots of equal size, or as many parts of one slot.
class Ring {
 public:
  Ring() = default;
  Ring(const Piece& first, std::size_t slots, bool in_one_slot = false)
      : first_(first), slots_(slots), in_one_slot_(in_one_slot) {}

  std::size_t slots() const { return slots_; }
  Piece at(std::size_t turn) const {
    const std::size_t index = turn % slots_;
    return in_one_slot_ ? Piece{first_.slot, index * first_.bytes, first_.bytes}
                        : Piece{first_.slot + index, 0, first_.bytes};
  }

  Piece next(std::size_t bytes) { return next().part(0, bytes); }
  Piece next() { return at(turn_++); }

 private:
  Piece first_{};
  std::size_t slots_ = 0;
  bool in_one_slot_ = false;
  std::size_t turn_ = 0;
};

// Memory for the pieces of units in turn, of which two neighbours have room together: they lie at its ends.
class Ends {
 public:
  Ends() = default;
  explicit Ends(const Piece& all) : all_(all) {}

  Piece next(std::size_t bytes) {
    at_end_ = !at_end_;
    return all_.part(at_end_ ? all_.bytes - round_up(bytes, gathered_alignment) : 0, bytes);
  }

 private:
  Piece all_{};
  bool at_end_ = true;
};

// The list of a program's slots while it grows.
class SlotList {
 public:
  const std::vector<Slot>& all() const { return all_; }

  std::size_t add(SlotRole role, Tier tier, std::size_t bytes, std::string_view which = {}) {  // its index
    all_.push_back(
        {role, which.empty() ? std::string(name(role)) : fmt::format("{}.{}", name(role), which), tier, bytes});
    return all_.size() - 1;
  }

  Ring add_ring(SlotRole role, Tier tier, std::size_t slots, std::size_t bytes) {
    if (slots * bytes == 0) return {};
    const std::size_t first = all_.size();
    for (std::size_t i = 0; i < slots; ++i) {
      add(role, tier, bytes, std::to_string(i));
    }
    return {{first, 0, bytes}, slots};
  }

  // Adds one slot of full huge pages, on the host, for all records.
  // A record alone is often too small for huge pages. A drive takes a request of 2 MiB from a huge page, but only 1 MiB
  // at a time from small pages. The latter holds for all of a queue's memory if some of it has small pages: a drive that
  // was measured reached 1.5 GB/s instead of 2.7.
  Ring add_records(SlotRole role, std::size_t records, std::size_t bytes) {
    if (records * bytes == 0) return {};
    const bool huge = records * bytes >= 2 * huge_page_bytes;
    const std::size_t together = round_up(records * bytes, huge ? huge_page_bytes : 1);
    return {{add(role, Tier::host, together), 0, bytes}, records, true};
  }

  // Adds one slot with a piece of so many bytes for each tile; none for a tile without bytes.
  std::vector<Piece> add_pieces(SlotRole role, Tier tier, const std::vector<std::size_t>& bytes,
                                std::string_view which) {
    std::vector<Piece> by_tile(bytes.size());
    const std::size_t all = std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
    if (all == 0) return by_tile;
    const std::size_t slot = add(role, tier, all, which);
    std::size_t begin = 0;
    for (std::size_t tile = 0; tile < bytes.size(); ++tile) {
      if (bytes[tile] > 0) by_tile[tile] = {slot, begin, bytes[tile]};
      begin += bytes[tile];
    }
    return by_tile;
  }

 private:
  std::vector<Slot> all_;
};

// A unit's slots between steps; `none` where it has no such thing.
struct UnitSlots {
  // The slot on the device: full parameters, or this rank's shard of both sections, one after the other.
  std::size_t parameters = none;
  std::size_t frozen = none;  // the slot on the host, if parameters are there: this rank's shard of the frozen section
  std::size_t gradients = none;  // full, where a step's micro-steps are summed in them
  std::size_t reduced = none;    // this rank's summed gradients
  // One for each tile. Neighbours in a tier are neighbours in memory, so one operation reaches several.
  std::vector<Piece> state{};            // on the device or on the host
  std::vector<Piece> host_parameters{};  // of a tile whose state is on the host or on a drive
};

// The buffers of a step.
struct StepRings {
  Ends partial{};          // device: summed over the shard group, not yet over the replicas
  Ends arriving{};         // device: summed gradients on their way to where they are kept
  Ends landed{};           // host: the same, to be added there
  Ends unsummed{};         // host: full gradients of this rank, to be summed there
  Ring tile_gradients{};   // host: a tile's gradient, for an update on the host
  Ring tile_parameters{};  // host: the same of its parameter, if its record has none
  Ring tile_directions{};  // host: the same of its direction, for a rule of whole matrices
  Ring visitors{};  // device: what an update of a host's tile there needs of it: its block, and a gradient on the host
  Ring directions{};     // device: of all of a unit's tiles
  Ring matrices{};       // device: the whole matrices of this rank
  Ring first_regions{};  // host: first regions of records
  Ring staging{};        // host: records on their way
};

class StepSlots {
 public:
  static constexpr std::size_t tiles_at_once = 12;  // of an update on the host, and of a copy of parameters from there

  StepSlots(const CompileInput& input, const Uses& uses)
      : in_(input), residence_(reside(input.placement, input.layout)) {
    const Placement& placement = input.placement;
    const double others = others_of_visitors(input, residence_);
    for (std::size_t unit = 0; unit < input.model.units.size(); ++unit) {
      const bool all_here = input.layout.units[unit].trained.shards == 1 && residence_[unit].parameters == Tier::device;
      is_gathered_per_use_.push_back(!placement.full_parameters && !all_here);
      sums_.push_back(placement.reduction == Reduction::each ? uses.backward_visits(unit) * input.micro_steps : 1);
      add_unit(unit, uses);
      visitors_.push_back(visitors_of(input, residence_[unit], unit, others));
      add_tiles(unit);
    }
    if (input.needs_matrices()) matrices_ = home_matrices(input.model, input.layout);
    add_gathered(uses);
    if (placement.reduction == Reduction::each) add_gradients(uses);
    add_rings();
    if (input.needs_matrices()) add_matrices();
    add_records();
    add_norms();
    add_codes();
    add_memory_of_reductions();
    rings_at_begin_ = rings;
  }

  const std::vector<Slot>& all() const { return slots_.all(); }
  const UnitResidence& residence(std::size_t unit) const { return residence_[unit]; }
  const UnitSlots& of(std::size_t unit) const { return units_[unit]; }

  std::vector<Home> homes() const {  // the memory in which parameters and state lie between steps
    std::vector<Home> homes;
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      add_kept_parameters(unit, homes);
      for (std::size_t tile = 0; tile < in_.layout.units[unit].tiles.size(); ++tile) {
        homes.push_back(home_of_tile(unit, tile));
      }
      add_frozen_tiles(unit, homes);
    }
    return homes;
  }

  // Whether a unit's full parameters are there only from a gather to the end of its use.
  bool is_gathered_per_use(std::size_t unit) const { return is_gathered_per_use_[unit]; }

  std::size_t full_bytes(std::size_t unit) const { return in_.layout.units[unit].elements() * in_.width(unit); }

  // Whether later uses of a step add to a unit's sum directly: a lone rank reduces nothing.
  bool adds_at_home(std::size_t unit) const {
    const bool is_lone = in_.placement.ranks() == 1 && in_.placement.reduction == Reduction::each;
    return is_lone && units_[unit].reduced != none && residence_[unit].gradients == Tier::device;
  }

  // Whether a unit's sum takes the place of its gradients until it is copied or used: that of a lone rank in the same format.
  bool sums_in_place(std::size_t unit) const {
    const bool stays = units_[unit].reduced != none && residence_[unit].gradients == Tier::device;
    const bool is_lone = in_.placement.ranks() == 1 && in_.placement.reduction == Reduction::each;
    return is_lone && !stays && in_.dtype_of_sums(unit) == in_.model.units[unit].dtype;
  }

  // The parts of a rank's shard of a unit in which its sum goes to the host, each in the memory of one before it. Ranks that
  // exchange gradients sum a shard at once.
  std::vector<Range> parts_of_sum(std::size_t unit) const {
    const UnitLayout& layout = in_.layout.units[unit];
    const bool passes =
        residence_[unit].gradients == Tier::host && in_.placement.ranks() == 1 && units_[unit].reduced != none;
    return cut({0, layout.trained.shard}, passes ? tiles_at_once * layout.tile_elements : layout.trained.shard);
  }

  bool sums_on_host(std::size_t unit) const { return ballast::sums_on_host(in_, residence_[unit], unit); }

  // Returns the bytes of a unit's gradients, and of its reduced ones.
  std::size_t gradient_bytes(std::size_t unit) const {
    return in_.layout.units[unit].trained.count() * in_.width(unit);
  }
  std::size_t shard_bytes(std::size_t unit) const {
    return in_.layout.units[unit].trained.shard * in_.width_of_sums(unit);
  }

  // Returns the bytes of a unit's gradients that are not summed over the replicas yet.
  std::size_t partial_bytes(std::size_t unit) const {
    return in_.kept(in_.layout.units[unit].trained).shard * sizeof(float);
  }

  // Return the codes of a gather per use, and of a reduction; none if it is exact.
  Codes gather_codes(std::size_t unit, const Section& section) const {
    if (!in_.gathers_codes(unit)) return {};
    Codes codes = codes_of_gather(in_.wire, in_.kept(section));
    if (codes.memory.bytes > 0) codes.memory.slot = gather_codes_;
    return codes;
  }

  Codes reduce_codes(std::size_t unit, Ranks ranks) const {
    Codes codes = codes_of_reduction(in_.wire, in_.placement, in_.layout.units[unit], ranks);
    if (codes.memory.bytes > 0) codes.memory.slot = reduce_codes_;
    return codes;
  }

  // Memory for the gradients of backward uses: enough for all units that are held together, and for each unit and its neighbour.
  const Piece& gradients() const { return gradients_; }

  std::size_t gathered_slot() const { return gathered_; }
  std::size_t gathered_bytes() const { return gathered_ == none ? 0 : all()[gathered_].bytes; }
  // Whether a unit's sum is complete when it arrives on the device, on its way to the host: its squares are added there,
  // before they pass the slower link and wait for the CPU.
  bool is_normed_on_its_way(std::size_t unit) const {
    return residence_[unit].gradients == Tier::host && !in_.host_is_device && sums_[unit] == 1 && !sums_on_host(unit);
  }

  // The tier where the program adds a unit's sum to the norm.
  Tier norm_tier(std::size_t unit) const {
    return is_normed_on_its_way(unit) ? Tier::device : residence_[unit].gradients;
  }

  // Whether the device updates a tile whose state is on the host: it does for the first `visitors` of a unit.
  std::size_t visitors(std::size_t unit) const { return visitors_[unit]; }
  bool is_visitor(std::size_t unit, std::size_t tile) const {
    const std::vector<Tier>& state = residence_[unit].state;
    const auto before = std::count(state.begin(), state.begin() + static_cast<std::ptrdiff_t>(tile), Tier::host);
    return state[tile] == Tier::host && static_cast<std::size_t>(before) < visitors_[unit];
  }

  // One past the tiles that an operation updates together, from this one on: the host updates neighbours whose state it keeps. So
  // few operations wait for another lane, and its threads seldom wait for each other.
  std::size_t end_of_update(std::size_t unit, std::size_t tile) const {
    const std::vector<Tier>& state = residence_[unit].state;
    const auto is_on_host = [&](std::size_t each) { return state[each] == Tier::host && !is_visitor(unit, each); };
    std::size_t end = tile + 1;
    if (!is_on_host(tile)) return end;
    while (end < state.size() && end - tile < tiles_at_once && is_on_host(end))
      ++end;
    return end;
  }

  // What the host keeps of a tile whose state is there. An update on the host needs a parameter there, even if the device keeps it.
  BlockSizes block_sizes(std::size_t unit, std::size_t tile) const {
    BlockSizes sizes = in_.blocks.of(unit);
    if (residence_[unit].parameters == Tier::device && is_visitor(unit, tile)) sizes.parameter = 0;
    return sizes;
  }

  // The norm of sums in this tier.
  const Piece& norm(Tier tier) const { return norms_[static_cast<std::size_t>(tier)]; }
  const std::vector<Piece>& kept() const { return kept_; }  // host: records that stay in memory

  // Only a rule of whole matrices has them.
  const UnitMatrices& matrices(std::size_t unit) const { return matrices_[unit]; }
  const Piece& workspace() const { return workspace_; }
  // Units whose updates are under way at once: the products of one, while those of the next are prepared.
  std::size_t updates_at_once() const { return in_.needs_matrices() && !in_.schedule.update_in_backward ? 2 : 1; }

  StepRings rings;
  void restart_rings() { rings = rings_at_begin_; }  // every step uses them in the same way

 private:
  static constexpr std::size_t pieces_in_flight = 2;     // one is filled while the other is used
  static constexpr std::size_t tiles_on_their_way = 4;   // tiles that move from the device to updates on the host
  static constexpr std::size_t visitors_at_once = 3;     // one arrives, one is updated, one leaves
  static constexpr std::size_t mirrored_in_flight = 2;   // one arrives while the other is written
  static constexpr std::size_t first_regions_ahead = 8;  // read for the gathers that come next

  void add_unit(std::size_t unit, const Uses& uses) {
    const UnitLayout& layout = in_.layout.units[unit];
    const std::string which = std::to_string(unit);
    UnitSlots& slots = units_.emplace_back();
    if (residence_[unit].parameters == Tier::device) {
      const std::size_t elements = is_gathered_per_use_[unit]
                                       ? in_.kept(layout.trained).shard + in_.kept(layout.frozen).shard
                                       : layout.elements();
      slots.parameters = slots_.add(SlotRole::parameters, Tier::device, elements * in_.width(unit), which);
    } else if (residence_[unit].parameters == Tier::host && layout.frozen.shard > 0) {
      slots.frozen = slots_.add(SlotRole::frozen, Tier::host, layout.frozen.shard * in_.width(unit), which);
    }
    if (layout.trained.shard == 0) return;
    if (in_.placement.reduction == Reduction::boundary) {
      slots.gradients = slots_.add(SlotRole::gradients, Tier::device, layout.trained.count() * in_.width(unit), which);
    }
    if (in_.updates_by_layers() && uses.is_once_in_a_row(unit)) {
      slots.reduced = sum_in_turn(residence_[unit].gradients);
    } else if (!in_.schedule.update_in_backward || sums_[unit] > 1) {
      slots.reduced = slots_.add(SlotRole::reduced, residence_[unit].gradients, shard_bytes(unit), which);
    }
  }

  // Units that are updated right after their last backward use keep their sums in the same memory, in turn.
  std::size_t sum_in_turn(Tier tier) {
    std::vector<std::size_t>& shared = sums_in_turn_[static_cast<std::size_t>(tier)];
    if (shared.size() < pieces_in_flight) {
      std::size_t bytes = 0;
      for (std::size_t unit = 0; unit < in_.model.units.size(); ++unit)
        bytes = std::max(bytes, shard_bytes(unit));
      shared.push_back(slots_.add(SlotRole::reduced, tier, bytes, fmt::format("{} in turn", shared.size())));
      return shared.back();
    }
    std::rotate(shared.begin(), shared.begin() + 1, shared.end());
    return shared.back();
  }

  void add_tiles(std::size_t unit) {
    const std::vector<Tier>& state = residence_[unit].state;
    const std::size_t tiles = state.size();
    const std::size_t copied = residence_[unit].parameters == Tier::host ? in_.blocks.of(unit).parameter : 0;
    const bool is_shared =
        gathers_from_host(in_, residence_[unit], unit);  // then other ranks map memory of parameters alone
    std::vector<std::size_t> on_device(tiles), blocks(2 * tiles), copies(tiles);
    for (std::size_t tile = 0; tile < tiles; ++tile) {
      switch (state[tile]) {
        case Tier::device: on_device[tile] = in_.blocks.state_bytes_on_device(unit); break;
        case Tier::host: {
          const BlockSizes sizes = block_sizes(unit, tile);
          (is_shared ? copies : blocks)[tile] = sizes.parameter;  // all parameters come before all states
          blocks[tiles + tile] = sizes.state;
          break;
        }
        case Tier::nvme: copies[tile] = copied; break;
      }
    }
    const std::string which = std::to_string(unit);
    UnitSlots& slots = units_[unit];
    slots.state = slots_.add_pieces(SlotRole::state, Tier::device, on_device, which);
    const std::vector<Piece> in_blocks = slots_.add_pieces(SlotRole::blocks, Tier::host, blocks, which);
    slots.host_parameters = slots_.add_pieces(SlotRole::parameters, Tier::host, copies, which);
    for (std::size_t tile = 0; tile < tiles; ++tile) {
      if (state[tile] != Tier::host) continue;
      if (!is_shared) slots.host_parameters[tile] = in_blocks[tile];
      slots.state[tile] = in_blocks[tiles + tile];
    }
  }

  static std::size_t bytes_of(std::span<const Visit> visits, const std::vector<std::size_t>& unit_bytes) {
    std::set<std::size_t> units;
    std::size_t bytes = 0;
    for (const Visit& visit : visits) {
      if (units.insert(visit.unit).second) bytes += unit_bytes[visit.unit];
    }
    return bytes;
  }

  // Returns enough for any unit in the trace with the `prefetch` ones after it, and for units that are held together, whether
  // they are in the trace or not. `unit_bytes`: of each unit's full parameters, aligned; 0 where they stay.
  std::size_t bytes_to_gather(const Uses& uses, const std::vector<std::size_t>& unit_bytes) const {
    const std::span<const Visit> trace = uses.trace();
    std::size_t most = 0;
    for (std::size_t i = 0; i < trace.size(); i = uses.end_of_row(i)) {
      const std::size_t prefetched = uses.end_of_units(i, in_.schedule.prefetch, trace.size());
      const std::size_t end = std::max(prefetched, std::min(uses.end_of_chain(i), trace.size()));
      most = std::max(most, bytes_of(trace.subspan(i, end - i), unit_bytes));
    }
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      most = std::max(most, bytes_of(visits_of(in_.model, unit, Phase::forward), unit_bytes));
    }
    return most;
  }

  void add_gathered(const Uses& uses) {
    if (std::ranges::none_of(is_gathered_per_use_, [](bool yes) { return yes; })) return;
    std::vector<std::size_t> unit_bytes;
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      unit_bytes.push_back(is_gathered_per_use_[unit] ? round_up(full_bytes(unit), gathered_alignment) : 0);
    }
    const std::size_t needed = bytes_to_gather(uses, unit_bytes);
    const std::size_t all = std::accumulate(unit_bytes.begin(), unit_bytes.end(), std::size_t{0});
    const std::size_t bytes = in_.gathered_bytes.value_or(std::clamp(in_.schedule.gathered_bytes, needed, all));
    gathered_ = slots_.add(SlotRole::gathered, Tier::device, bytes);
  }

  // Returns the most that a unit and the next one with such bytes take together, or one unit.
  template <class Bytes>
  std::size_t most_of_neighbours(const Bytes& bytes_of) const {
    std::size_t most = 0;
    std::size_t before = 0;
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      const std::size_t bytes =
          in_.layout.units[unit].trained.shard == 0 ? 0 : round_up(bytes_of(unit), gathered_alignment);
      if (bytes == 0) continue;
      most = std::max(most, before + bytes);
      before = bytes;
    }
    return most;
  }

  template <class Bytes>
  Ends add_ends(SlotRole role, Tier tier, const Bytes& bytes_of) {
    const std::size_t bytes = most_of_neighbours(bytes_of);
    return bytes == 0 ? Ends() : Ends({slots_.add(role, tier, bytes), 0, bytes});
  }

  // Returns the most of all units with gradients.
  template <class Bytes>
  std::size_t most(const Bytes& bytes_of) const {
    std::size_t most = 0;
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      if (in_.layout.units[unit].trained.shard > 0) most = std::max<std::size_t>(most, bytes_of(unit));
    }
    return most;
  }

  // Returns the elements of the largest update on the host of which gradients or directions pass to it.
  std::size_t elements_to_host(std::size_t unit) const {
    if (in_.host_is_device) return 0;
    std::size_t tiles = 0;
    const std::vector<Tier>& state = residence_[unit].state;
    for (std::size_t tile = 0; tile < state.size(); tile = end_of_update(unit, tile)) {
      if (state[tile] != Tier::device && !is_visitor(unit, tile))
        tiles = std::max(tiles, end_of_update(unit, tile) - tile);
    }
    return tiles * in_.layout.units[unit].tile_elements;
  }

  // Units that are held together may be those of the trace, or those of any unit that an off-plan step uses.
  void add_gradients(const Uses& uses) {
    std::vector<std::size_t> unit_bytes;
    for (std::size_t unit = 0; unit < units_.size(); ++unit)
      unit_bytes.push_back(round_up(gradient_bytes(unit), gathered_alignment));
    std::size_t most = most_of_neighbours([&](std::size_t unit) { return unit_bytes[unit]; });
    const std::span<const Visit> trace = uses.trace();
    for (std::size_t i = 0; i < trace.size(); ++i) {
      const std::size_t end = std::min(uses.end_of_chain(i), trace.size());
      most = std::max(most, bytes_of(trace.subspan(i, end - i), unit_bytes));
    }
    for (std::size_t unit = 0; unit < units_.size(); ++unit)
      most = std::max(most, bytes_of(visits_of(in_.model, unit, Phase::backward), unit_bytes));
    if (most > 0) gradients_ = {slots_.add(SlotRole::gradients, Tier::device, most), 0, most};
  }

  void add_rings() {
    const bool each = in_.placement.reduction == Reduction::each;
    const bool mesh = in_.placement.ranks_per_group() > 1 && in_.placement.groups() > 1;
    const auto passes_by = [&](std::size_t unit) {  // the sum so far, or the home that the sum does not have
      const bool adds = each && (sums_[unit] > 1 || in_.extra_sum_slots) && !adds_at_home(unit);
      return adds || units_[unit].reduced == none;
    };
    const auto part_bytes = [&](std::size_t unit) {
      return parts_of_sum(unit).front().count * in_.width_of_sums(unit);
    };
    const auto on_host = [&](std::size_t unit) { return residence_[unit].gradients == Tier::host; };
    const std::size_t tile_gradients =
        most([&](std::size_t unit) { return on_host(unit) ? 0 : elements_to_host(unit) * in_.width_of_sums(unit); });
    const std::size_t tile_parameters = most([&](std::size_t unit) {
      const bool passes = !in_.host_is_device && residence_[unit].parameters == Tier::device && records_of(unit) > 0;
      return passes && !in_.blocks.full_records() ? in_.blocks.of(unit).parameter : 0;
    });
    rings.partial =
        add_ends(SlotRole::partial, Tier::device, [&](std::size_t unit) { return mesh ? partial_bytes(unit) : 0; });
    // Whether there are any depends on the order of uses, but not how large they are.
    const bool arrives = most([&](std::size_t unit) { return passes_by(unit) || on_host(unit); }) > 0;
    const bool lands = most([&](std::size_t unit) { return passes_by(unit) && on_host(unit); }) > 0;
    rings.arriving = add_ends(SlotRole::arriving, Tier::device, [&](std::size_t unit) {
      return arrives && !sums_in_place(unit) && !adds_at_home(unit) && !sums_on_host(unit) ? part_bytes(unit) : 0;
    });
    rings.unsummed = add_ends(SlotRole::unsummed, Tier::host,
                              [&](std::size_t unit) { return sums_on_host(unit) ? gradient_bytes(unit) : 0; });
    rings.landed = add_ends(SlotRole::landed, Tier::host,
                            [&](std::size_t unit) { return lands && on_host(unit) ? part_bytes(unit) : 0; });
    rings.tile_gradients = slots_.add_ring(SlotRole::tile_gradients, Tier::host, tiles_on_their_way, tile_gradients);
    rings.tile_parameters = slots_.add_ring(SlotRole::tile_parameters, Tier::host, tiles_on_their_way, tile_parameters);
    rings.visitors =
        slots_.add_ring(SlotRole::visitors, Tier::device, visitors_at_once,
                        most([&](std::size_t unit) { return visitors_[unit] > 0 ? visitor_bytes(unit) : 0; }));
  }

  std::size_t visitor_bytes(std::size_t unit) const {
    const BlockSizes& sizes = in_.blocks.of(unit);
    const std::size_t parameter = residence_[unit].parameters == Tier::device ? 0 : sizes.parameter;
    const std::size_t gradients = in_.layout.units[unit].tile_elements * in_.width_of_sums(unit);
    return parameter + sizes.state + (residence_[unit].gradients == Tier::device ? 0 : gradients);
  }

  // The directions are the matrices if there is one rank.
  void add_matrices() {
    constexpr std::size_t width = byte_size(DType::bf16);
    const std::size_t units = updates_at_once();
    rings.tile_directions = slots_.add_ring(SlotRole::tile_directions, Tier::host, tiles_on_their_way,
                                            most([&](std::size_t unit) { return elements_to_host(unit) * width; }));
    rings.directions =
        slots_.add_ring(SlotRole::directions, Tier::device, units,
                        most([&](std::size_t unit) { return in_.layout.units[unit].trained.shard * width; }));
    rings.matrices = slots_.add_ring(SlotRole::matrices, Tier::device, units, most([&](std::size_t unit) {
                                       return in_.placement.shards > 1 ? matrices_[unit].elements * width : 0;
                                     }));
    const std::size_t workspace = most([&](std::size_t unit) { return workspace_bytes(unit); });
    workspace_ = {slots_.add(SlotRole::workspace, Tier::device, workspace), 0, workspace};
  }

  std::size_t workspace_bytes(std::size_t unit) const {
    std::size_t most = 0;
    for (const Tensor& tensor : in_.model.units[unit].tensors) {
      if (tensor.frozen) continue;
      for (const MatrixBlocks& blocks : blocks_of(tensor))
        most = std::max(most, kernels::workspace_bytes(blocks.shape, !in_.host_is_device));
    }
    return most;
  }

  // How many of a unit's tiles have records that change.
  std::size_t records_of(std::size_t unit) const {
    return static_cast<std::size_t>(std::ranges::count(residence_[unit].state, Tier::nvme));
  }

  // A rule of whole matrices keeps the records of all units that it updates at once.
  void add_records() {
    const RecordSizes& sizes = in_.blocks.records();
    std::vector<std::size_t> records;  // of each unit, the most first
    bool reads_parameters = false;
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      records.push_back(records_of(unit));
      const bool has_parameters = in_.layout.units[unit].elements() > 0;
      reads_parameters = reads_parameters || (has_parameters && residence_[unit].parameters == Tier::nvme);
    }
    std::ranges::sort(records, std::ranges::greater());
    const auto end_at_once = records.begin() + static_cast<std::ptrdiff_t>(std::min(updates_at_once(), records.size()));
    const std::size_t all = std::accumulate(records.begin(), records.end(), std::size_t{0});
    const std::size_t at_once =
        in_.needs_matrices() ? std::accumulate(records.begin(), end_at_once, std::size_t{0}) : 1;
    const std::size_t kept = std::min(in_.schedule.kept_records, all);
    const std::size_t staged = std::min(std::max(in_.schedule.staging_slots, at_once), all - kept);
    if (reads_parameters) {
      rings.first_regions = slots_.add_records(SlotRole::first_regions, first_regions_ahead, sizes.parameter_record());
    }
    rings.staging = slots_.add_records(SlotRole::staging, staged, sizes.record);
    const Ring stay = slots_.add_records(SlotRole::kept, kept, sizes.record);
    for (std::size_t i = 0; i < stay.slots(); ++i) {
      kept_.push_back(stay.at(i));
    }
    if (in_.mirror && all > 0) slots_.add_records(SlotRole::mirror, mirrored_in_flight, sizes.record);
  }

  void add_norms() {
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      if (shard_bytes(unit) == 0) continue;
      add_norm(residence_[unit].gradients);  // gradients on the host count too: off plan, their sum may change there
      if (is_normed_on_its_way(unit)) add_norm(Tier::device);
    }
  }

  void add_norm(Tier tier) {
    Piece& norm = norms_[static_cast<std::size_t>(tier)];
    constexpr std::size_t bytes = sizeof(kernels::ExactSum);
    if (!norm.exists()) norm = {slots_.add(SlotRole::norm, tier, bytes, name(tier)), 0, bytes};
  }

  // Each of the two lanes has its own, for one collective at a time.
  void add_codes() {
    std::size_t gathered = 0;
    std::size_t reduced = 0;
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      const UnitLayout& layout = in_.layout.units[unit];
      for (const Section* section : {&layout.trained, &layout.frozen}) {
        if (is_gathered_per_use_[unit]) gathered = std::max(gathered, gather_codes(unit, *section).memory.bytes);
      }
      for (const Ranks ranks : {Ranks::shard_group, Ranks::replica_group}) {
        reduced = std::max(reduced, reduce_codes(unit, ranks).memory.bytes);
      }
    }
    if (reduced > 0) reduce_codes_ = slots_.add(SlotRole::reduce_codes, Tier::device, reduced);
    if (gathered > 0) gather_codes_ = slots_.add(SlotRole::gather_codes, Tier::device, gathered);
  }

  // Both groups of a mesh reduce in one lane, one after the other, so they share it.
  void add_memory_of_reductions() {
    if (most([&](std::size_t unit) { return !sums_on_host(unit); }) == 0) return;
    const kernels::ReductionMemory memory = memory_of_reductions(in_);
    if (memory.received > 0) slots_.add(SlotRole::received, Tier::device, memory.received);
    if (memory.sums > 0) slots_.add(SlotRole::host_sums, Tier::device, memory.sums);
  }

  // Adds the homes of parameters that are kept apart from the tiles' blocks and records.
  void add_kept_parameters(std::size_t unit, std::vector<Home>& homes) const {
    const UnitLayout& layout = in_.layout.units[unit];
    const UnitSlots& slots = units_[unit];
    const auto add = [&](const Range& range, std::size_t slot, std::size_t begin) {
      if (range.count == 0 || slot == none) return;
      homes.push_back(
          {.unit = unit, .range = range, .parameters = {slot, begin * in_.width(unit), range.count * in_.width(unit)}});
    };
    const Range trained = layout.trained.shard_range(in_.rank_in_shard_group);
    const Range frozen = layout.frozen.shard_range(in_.rank_in_shard_group);
    if (is_gathered_per_use_[unit]) {
      const Range kept = in_.kept_range(layout.trained);
      add(trained, slots.parameters, trained.first - kept.first);
      add(frozen, slots.parameters, kept.count + frozen.first - in_.kept_range(layout.frozen).first);
    } else {
      add({0, layout.elements()}, slots.parameters, 0);
    }
    add(frozen, slots.frozen, 0);
  }

  // Frozen parameters on a drive have records of their own, because no step writes them.
  void add_frozen_tiles(std::size_t unit, std::vector<Home>& homes) const {
    if (residence_[unit].parameters != Tier::nvme) return;
    const UnitLayout& layout = in_.layout.units[unit];
    for (std::size_t i = 0; i < layout.frozen_tiles.size(); ++i) {
      const std::size_t tile = layout.tiles.size() + i;
      homes.push_back({.unit = unit,
                       .tile = tile,
                       .range = layout.tile_range(in_.rank_in_shard_group, tile),
                       .on_drive = true,
                       .frozen = true});
    }
  }

  Home home_of_tile(std::size_t unit, std::size_t tile) const {
    const UnitSlots& slots = units_[unit];
    Home home{.unit = unit, .tile = tile, .range = in_.layout.units[unit].tile_range(in_.rank_in_shard_group, tile)};
    const std::size_t parameter_bytes = home.range.count * in_.width(unit);
    home.state = slots.state[tile];
    if (slots.host_parameters[tile].exists()) home.parameters = slots.host_parameters[tile].part(0, parameter_bytes);
    home.on_drive = residence_[unit].state[tile] == Tier::nvme;
    return home;
  }

  const CompileInput& in_;
  std::vector<UnitResidence> residence_;
  std::vector<bool> is_gathered_per_use_;  // one for each unit
  std::vector<std::size_t> visitors_;      // how many tiles of each unit the device updates for the host
  std::vector<std::size_t> sums_;          // each unit's reductions that make up a step's gradients
  SlotList slots_;
  std::vector<UnitSlots> units_;
  std::array<std::vector<std::size_t>, tier_count> sums_in_turn_{};
  Piece gradients_{};
  std::size_t gathered_ = none;
  std::size_t gather_codes_ = none;
  std::size_t reduce_codes_ = none;
  std::vector<UnitMatrices> matrices_;  // one for each unit
  Piece workspace_{};
  std::vector<Piece> kept_;
  StepRings rings_at_begin_{};
  std::array<Piece, tier_count> norms_;  // one for each tier
};

}  // namespace ballast
