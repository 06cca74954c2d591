// RUN: gossamer-opt %s -p 'expose-storage' --verify-diagnostics
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
// expected-error @unknown {{@region returns 2 values, expose-storage needs one, or dense ones}}
func.func @region(%a: tensor<4x4xf32, #CSR>, %x: tensor<4xf32>) -> (tensor<4x4xf32, #CSR>, tensor<4xf32>) {
  return %a, %x : tensor<4x4xf32, #CSR>, tensor<4xf32>
}
