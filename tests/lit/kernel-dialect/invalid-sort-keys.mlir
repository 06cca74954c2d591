// Keys are integers, and all of them are put into order.
// RUN: gossamer-opt %s --split-input-file --verify-diagnostics

func.func @floats(%keys: tensor<?xf32>) -> (tensor<?xi32>, tensor<?xi64>) {
  // expected-error @below {{has keys tensor<?xf32>, must be integers [keys]}}
  %positions, %order = "kernel.sort_keys"(%keys) : (tensor<?xf32>) -> (tensor<?xi32>, tensor<?xi64>)
  return %positions, %order : tensor<?xi32>, tensor<?xi64>
}

// -----

func.func @some(%keys: tensor<8xi32>) -> (tensor<?xi32>, tensor<7xi64>) {
  // expected-error @below {{has order tensor<7xi64>, must be integers [8]}}
  %positions, %order = "kernel.sort_keys"(%keys) : (tensor<8xi32>) -> (tensor<?xi32>, tensor<7xi64>)
  return %positions, %order : tensor<?xi32>, tensor<7xi64>
}
