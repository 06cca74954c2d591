// An unknown kind is refused, by its name.
// RUN: not gossamer-opt %s -p 'lower-sum-bags' 2>&1 | filecheck %s

// CHECK: has the kind "median", must be one of sum, mean, max
func.func @refused(%lines: tensor<?x?xi64>) -> tensor<?xi64> {
  %wrong = "kernel.sum_bags"(%lines) {kind = "median", element = "f32", integers = "i64", weights = "none", columns = 7 : i64, wide = 0 : i64}
    : (tensor<?x?xi64>) -> tensor<?xi64>
  return %wrong : tensor<?xi64>
}
