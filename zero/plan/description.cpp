#include "zero/plan/description.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <utility>

#include "offload/checksum.h"

namespace ballast {
namespace {

constexpr std::string_view tiles_begin = "tiles of ";
constexpr std::string_view rule_begin = "the update rule ";
constexpr std::string_view format_begin = "state format ";
constexpr std::string_view frozen_begin = "frozen ";
constexpr std::string_view parameter_begin = "parameter ";
constexpr std::string_view parameter_copies = "copies of the parameters";
constexpr std::string_view stage_3 = "stage 3";

std::string stage_of(const Placement& placement) {
  if (!placement.full_parameters) return std::string(stage_3);
  if (placement.shards > 1) return "stage 1 or 2";
  return placement.replicas > 1 ? "stage 0" : "a stage below 3";  // stages below 3 are the same on one rank
}

std::string counted(std::size_t count, std::string_view one, std::string_view more) {
  return fmt::format("{} {}", count, count == 1 ? one : more);
}

// Replaces control characters: a name is any text, but a fact has to stay in one line.
std::string in_one_line(std::string name) {
  std::ranges::replace_if(
      name, [](unsigned char each) { return each < ' '; }, '?');
  return name;
}

std::string_view words_for(const Tensor& tensor) { return tensor.frozen ? "frozen parameter" : "parameter"; }

std::string line_of(const Tensor& tensor, DType dtype, std::size_t number) {
  return fmt::format("{} {} {} [{}] {}", words_for(tensor), number, in_one_line(tensor.name),
                     fmt::join(tensor.shape, ", "), name(dtype));
}

// Removes `begin` from the beginning of the text, if it is there.
bool take(std::string_view& text, std::string_view begin) {
  if (!text.starts_with(begin)) return false;
  text.remove_prefix(begin.size());
  return true;
}

// Removes a number from the beginning of the text.
std::optional<std::size_t> take_number(std::string_view& text) {
  std::size_t number = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (failure != std::errc{}) return {};
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

template <class Value, std::size_t count>
std::optional<Value> named(std::string_view word, const Value (&values)[count]) {
  for (const Value value : values) {
    if (name(value) == word) return value;
  }
  return {};
}

// Removes the last word of the text.
std::string_view take_last_word(std::string_view& text) {
  const std::size_t space = text.rfind(' ');
  if (space == std::string_view::npos) return std::exchange(text, {});
  const std::string_view word = text.substr(space + 1);
  text = text.substr(0, space);
  return word;
}

std::optional<std::vector<std::size_t>> shape_in(std::string_view text) {
  std::vector<std::size_t> shape;
  while (!text.empty()) {
    const auto size = take_number(text);
    if (!size || !(text.empty() || take(text, ", "))) return {};
    shape.push_back(*size);
  }
  return shape;
}

struct ReadTensor {
  Tensor tensor{};
  DType dtype{};
};

// The line that line_of() has written.
std::optional<ReadTensor> tensor_in(std::string_view line) {
  const bool frozen = take(line, frozen_begin);
  if (!take(line, parameter_begin) || !take_number(line) || !take(line, " ")) return {};
  const auto dtype = named(take_last_word(line), {DType::fp32, DType::bf16, DType::fp16, DType::u8});
  const std::size_t bracket = line.rfind(" [");
  if (!dtype || bracket == std::string_view::npos || !line.ends_with(']')) return {};
  const auto shape = shape_in(line.substr(bracket + 2, line.size() - bracket - 3));
  if (!shape) return {};
  return ReadTensor{{.name = std::string(line.substr(0, bracket)), .shape = *shape, .frozen = frozen}, *dtype};
}

// Reads the lines before those of units. Returns how many there are; 0 if they are not as they should be.
std::size_t read_head(std::span<const std::string> lines, Described& into) {
  if (lines.size() < 4) return 0;
  std::string_view ranks = lines[0];
  std::string_view copies = lines[2];
  std::string_view rule = lines[3];
  const auto all = take_number(ranks);
  const auto replicas = take_number(copies);
  const bool is_known = ranks.starts_with(" rank") && copies.starts_with(" cop") && take(rule, rule_begin);
  if (!is_known || !all || !replicas || *all == 0 || *replicas == 0 || *all % *replicas != 0) return 0;
  into.rule = rule;
  into.placement.shards = *all / *replicas;
  into.placement.replicas = *replicas;
  into.placement.full_parameters = lines[1] != stage_3;
  if (lines.size() == 4 || !lines[4].ends_with(parameter_copies)) return 4;
  std::string_view parameter_line = lines[4];
  const auto parameter_replicas = take_number(parameter_line);
  if (!parameter_replicas || *parameter_replicas == 0 || into.placement.shards % *parameter_replicas != 0) return 0;
  into.placement.parameter_replicas = *parameter_replicas;
  return 5;
}

// Reads a line of the unit that is the last one so far. Returns false if it is none.
bool read_line_of_unit(std::string_view line, Unit& unit, Described& into) {
  if (const auto found = tensor_in(line)) {
    unit.dtype = found->dtype;
    unit.tensors.push_back(found->tensor);
  } else if (take(line, format_begin)) {
    const auto format = named(line.substr(0, line.find(' ')), all_state_formats);
    const std::size_t name = line.find(" of unit ");
    if (!format || name == std::string_view::npos) return false;
    if (unit.dtype == DType::bf16) into.format = *format;
    line.remove_prefix(name + std::string_view(" of unit ").size());
    if (!take_number(line) || !take(line, " ")) return false;
    unit.name = line;
  } else if (take(line, tiles_begin)) {
    const auto elements = take_number(line);
    if (!elements) return false;
    into.tile_elements.push_back(*elements);
  } else {
    return line.starts_with(parameter_begin);  // a tie
  }
  return true;
}

bool has_frozen(const Model& model) {
  return std::ranges::any_of(model.units,
                             [](const Unit& unit) { return std::ranges::any_of(unit.tensors, &Tensor::frozen); });
}

// Lists them in the order of names.
std::vector<std::string> lasting_facts(const Model& model, std::string_view rule, bool frozen_too) {
  const auto names = names_in_runs(model);
  std::map<std::string, std::string> facts;  // sorted by name
  for (std::size_t unit = 0; unit < names.size(); ++unit) {
    for (std::size_t i = 0; i < names[unit].size(); ++i) {
      const Tensor& tensor = model.units[unit].tensors[i];
      if (tensor.frozen && !frozen_too) continue;
      facts[names[unit][i]] =
          fmt::format("{} {} [{}]", words_for(tensor), names[unit][i], fmt::join(tensor.shape, ", "));
    }
  }
  std::vector<std::string> lines{fmt::format("{}{}", rule_begin, rule)};
  for (auto& [name, fact] : facts)
    lines.push_back(std::move(fact));
  return lines;
}

}  // namespace

std::optional<Described> read_description(std::span<const std::string> lines) {
  Described found;
  const std::size_t head = read_head(lines, found);
  if (head == 0) return {};
  Unit unit;
  for (const std::string& line : lines.subspan(head)) {
    const std::size_t units = found.tile_elements.size();
    if (!read_line_of_unit(line, unit, found)) return {};
    if (found.tile_elements.size() > units) found.model.units.push_back(std::exchange(unit, {}));
  }
  const bool is_whole = unit.tensors.empty() && !found.model.units.empty();
  return is_whole ? std::optional(std::move(found)) : std::nullopt;
}

std::vector<std::string> describe(const CompiledPlan& plan) {
  const Placement& placement = plan.placement();
  const std::vector<Unit>& units = plan.model().units;
  std::vector<std::string> lines{
      counted(placement.ranks(), "rank", "ranks"),
      stage_of(placement),
      counted(placement.replicas, "copy of the state", "copies of the state"),
      fmt::format("{}{}", rule_begin, plan.rule()),
  };
  if (placement.parameter_replicas > 1)
    lines.push_back(fmt::format("{} {}", placement.parameter_replicas, parameter_copies));
  std::size_t parameters = 0;
  for (std::size_t i = 0; i < units.size(); ++i) {
    for (const Tensor& tensor : units[i].tensors) {
      lines.push_back(line_of(tensor, units[i].dtype, ++parameters));
    }
    for (const Tie& tie : units[i].ties) {
      lines.push_back(fmt::format("parameter {} tied to {} of unit {}", in_one_line(tie.name),
                                  in_one_line(units[tie.unit].tensors[tie.tensor].name),
                                  in_one_line(units[tie.unit].name)));
    }
    const std::string unit = fmt::format("unit {} {}", i + 1, in_one_line(units[i].name));
    lines.push_back(fmt::format("{}{} of {}", format_begin, name(plan.blocks().state(i, 0).format()), unit));
    lines.push_back(fmt::format("{}{} elements of {}", tiles_begin, plan.layout().units[i].tile_elements, unit));
  }
  return lines;
}

std::string describe(const optim::Rule& rule) {
  const std::size_t own = optim::state_names(rule).own_values;
  return fmt::format("{}{}", optim::name(rule), own == 0 ? "" : fmt::format(" with {} values of each element", own));
}

std::optional<optim::StateNames> names_of_rule(std::string_view described) {
  using namespace optim;
  const std::size_t with = described.find(" with ");
  std::size_t values = 0;
  std::string_view count =
      with == std::string_view::npos ? "" : described.substr(with + std::string_view(" with ").size());
  if (const auto found = take_number(count)) values = std::min(*found, max_own_values);
  for (const Rule& rule : {Rule(AdamW{}), Rule(Adam{}), Rule(Sgd{}), Rule(SgdMomentum{}), Rule(Lion{}), Rule(Adagrad{}),
                           Rule(Muon{}), Rule(External::with_values(values))}) {
    if (describe(rule) == described) return state_names(rule);
  }
  return {};
}

std::vector<std::vector<std::string>> names_of_whole_units(const Model& model) {
  const auto unit = std::ranges::find_if(model.units, [](const Unit& each) { return each.parts > 1; });
  require(unit == model.units.end(), Code::unsupported, [&] {
    return Problem{.what = "cannot save or load parts of a unit, such as experts: their tensors have the same names",
                   .where = "unit " + unit->name,
                   .needed = "files of the trainer's own; from Python, ballast.save() has names of all parts"};
  });
  return names_in_runs(model);
}

std::vector<std::vector<std::string>> names_in_runs(const Model& model) {
  std::map<std::string_view, std::size_t> times;
  for (const Unit& unit : model.units) {
    for (const Tensor& tensor : unit.tensors)
      ++times[tensor.name];
  }
  std::vector<std::vector<std::string>> names(model.units.size());
  for (std::size_t i = 0; i < model.units.size(); ++i) {
    const Unit& unit = model.units[i];
    for (const Tensor& tensor : unit.tensors) {
      names[i].push_back(
          in_one_line(times[tensor.name] == 1 ? tensor.name : fmt::format("{}.{}", unit.name, tensor.name)));
    }
  }
  return names;
}

std::optional<Difference> first_obstacle(const Described& run, const Model& model, std::string_view rule) {
  const bool frozen_too = has_frozen(run.model) && has_frozen(model);
  return first_difference(lasting_facts(run.model, run.rule, frozen_too), lasting_facts(model, rule, frozen_too));
}

std::size_t largest_tile(std::span<const std::string> lines) {
  std::size_t largest = 0;
  for (const std::string& line : lines) {
    if (!line.starts_with(tiles_begin)) continue;
    std::size_t elements = 0;
    std::from_chars(line.data() + tiles_begin.size(), line.data() + line.size(), elements);
    largest = std::max(largest, elements);
  }
  return largest;
}

std::uint64_t digest_of(std::span<const std::string> lines) {
  std::uint64_t digest = 0;
  for (const std::string& line : lines) {
    digest = offload::checksum(std::as_bytes(std::span(line)), digest);
  }
  return digest;
}

std::optional<Difference> first_difference(std::span<const std::string> one, std::span<const std::string> other) {
  const auto own = [](std::span<const std::string> lines, std::span<const std::string> others) {
    const std::set<std::string_view> known(others.begin(), others.end());
    const auto found = std::ranges::find_if(lines, [&](const std::string& line) { return !known.contains(line); });
    return found == lines.end() ? std::nullopt : std::optional(*found);
  };
  const auto one_line = own(one, other);
  const auto other_line = own(other, one);
  if (!one_line && !other_line) return {};
  return Difference{one_line.value_or("nothing more"), other_line.value_or("nothing more")};
}

std::optional<RecordedState> RecordedState::of(std::span<const std::string> lines, const optim::StateNames& names) {
  std::optional<Described> described = read_description(lines);
  const std::size_t tile = largest_tile(lines);
  if (!described || tile == 0 || tile % group_size != 0) return {};
  Layout layout = make_layout(described->model, described->placement.shards, tile);
  for (std::size_t unit = 0; unit < layout.units.size(); ++unit) {
    if (layout.units[unit].tile_elements != described->tile_elements[unit]) return {};
  }
  return RecordedState(std::move(*described), std::move(layout), names);
}

RecordedState::RecordedState(Described described, Layout layout, const optim::StateNames& names)
    : described_(std::move(described)),
      layout_(std::move(layout)),
      blocks_(described_.model, layout_, described_.placement,
              {.format = described_.format, .names = names, .full_records = true}) {
  const auto named = names_in_runs(described_.model);
  for (std::size_t unit = 0; unit < layout_.units.size(); ++unit) {
    first_record_.push_back(std::exchange(records_, records_ + layout_.units[unit].tiles.size()));
    for (std::size_t tensor = 0; tensor < named[unit].size(); ++tensor) {
      if (!described_.model.units[unit].tensors[tensor].frozen) tensors_[named[unit][tensor]] = {unit, tensor};
    }
  }
}

std::vector<std::string> RecordedState::trained() const {
  std::vector<std::string> trained;
  for (const std::vector<std::string>& unit_names : names_in_runs(described_.model)) {
    std::ranges::copy_if(unit_names, std::back_inserter(trained),
                         [&](const std::string& name) { return tensors_.contains(name); });
  }
  return trained;
}

std::vector<RecordedState::Part> RecordedState::parts_of(const std::string& name, Range range) const {
  const auto [unit, tensor] = tensors_.at(name);
  const UnitLayout& layout = layout_.units[unit];
  std::vector<Part> parts;
  for (const TensorPart& owned : owners_of(described_.model.units[unit], layout, tensor, range)) {
    for (std::size_t done = 0; done < owned.range.count;) {  // each turn takes one tile of the shard
      const std::size_t in_shard = owned.in_shard + done;
      const std::size_t tile = in_shard / layout.tile_elements;
      const std::size_t count = std::min(owned.range.count - done, layout.tiles[tile].end() - in_shard);
      parts.push_back({owned.rank,
                       first_record_[unit] + tile,
                       in_shard - layout.tiles[tile].first,
                       {owned.range.first + done, count}});
      done += count;
    }
  }
  return parts;
}

ChunkKind RecordedState::kind(std::size_t unit) const {
  std::byte anywhere{};
  const TileMemory tile = blocks_.recorded(unit, 0, 0, &anywhere);
  ChunkKind kind = kind_of(tile, false);
  kind.own_values = tile.own.count;
  return kind;
}

}  // namespace ballast
