"""An example of docs/add-a-workload.md: ratings of books from a CSV file, learned by the model of micro-dlrm."""
