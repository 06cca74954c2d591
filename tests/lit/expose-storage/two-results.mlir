// A region has one result.
// RUN: gossamer-opt %s -p expose-storage --verify-diagnostics

// expected-error @unknown {{@region returns 2 values, expose-storage needs one}}
func.func @region(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  return %x, %x : tensor<4xf32>, tensor<4xf32>
}
